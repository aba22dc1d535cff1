"""Seams to engines. No mathematics here: each calls the stages."""
