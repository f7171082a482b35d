"""Lists of layers as captured stages of a pipeline, and the schedules that run them."""
