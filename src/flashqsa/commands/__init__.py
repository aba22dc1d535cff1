"""The command line: one file a sub-command, put together by `app.py`.

Exit codes: 0 success, 1 the output was not read to its end, 2 wrong input, 3 the outcome differs from what it was
compared with, 4 `doctor` found a problem, 130 interrupted.
"""

EXIT_NOT_READ = 1
EXIT_WRONG_INPUT = 2
EXIT_MISMATCH = 3
EXIT_PROBLEM = 4
EXIT_INTERRUPTED = 130
