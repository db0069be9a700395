"""The fused Triton kernels: op -> launch -> forward | head | backward -> tiles, configs."""
