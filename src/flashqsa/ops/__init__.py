"""The stages as torch.library operators, for graphs; eager calls never come here.

A compiled or fake-traced call of `prepare`, `select_blocks`, `attend` or `attend_tokens` becomes one operator of the
namespace ``flashqsa``. The graph allocates its results and hands them over to be written, like the caches; the operator
runs the eager function, checks included, on what it is given.

An operator takes tensors and numbers only, so plan, caches and selection are taken apart before it and put together in
it. What the plan keeps besides, scratch and host copies, is the operator's own and lives as long as its call: a CUDA
graph's memory pool then holds nothing that outlives the graph, no registry of plans is needed, and tensors that a graph
has moved are read where they are. The price is one clearing of the counters an attention call, and on the CPU the
reading of the row groups a call instead of a step.
"""
