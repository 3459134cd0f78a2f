"""How many processor threads the computation takes."""

import os

import torch
from threadpoolctl import threadpool_limits


def use_threads(asked: int | None) -> int:
    """Give PyTorch `asked` threads, by default one less than there are cores, and numpy's products one.

    Audio and window need a core of their own, and a waiting thread of a matrix product takes it from them.
    Affects the calling thread's PyTorch and the whole process' numpy. Returns the number.
    """
    num_threads = asked or max(1, (os.cpu_count() or 2) - 1)
    torch.set_num_threads(num_threads)
    threadpool_limits(limits=1, user_api="blas")
    return num_threads
