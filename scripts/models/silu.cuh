#pragma once

__device__ inline float silu(float x) { return x / (1.f + expf(-x)); }
