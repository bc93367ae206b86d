"""The kernels. Each module holds one kernel family and the function that launches it; none knows the provider or a step."""
