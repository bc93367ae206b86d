"""The kernels. Each module holds one kernel family and its launcher; none knows the backend or a step."""
