"""The definition and registration of operators: dispatch, autograd, DTensor rules, helpers of the Triton kernels."""
