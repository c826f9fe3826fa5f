// How a kernel finds K and V.
#pragma once

// In (batch, heads, seq, dim) tensors.
struct Dense {};
