"""All-reduce kernels of other projects, called in the processes that they are compared in."""
