// The device as one translation unit. PyTorch's headers are what compiling costs, and these files need mostly the same ones: read once,
// they compile in half the time.
#include "ledger.cpp"
#include "faults.cpp"
#include "memory.cpp"
#include "runtime.cpp"
#include "fallback.cpp"
#include "compute.cpp"
#include "fused.cpp"
#include "matmul.cpp"
#include "kernels.cpp"
#include "bindings.cpp"
