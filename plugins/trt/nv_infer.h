// TensorRT's plugin interfaces: those of the SDK this library is built with, else our own.
#pragma once

#ifdef LOOPTRT_TENSORRT_HEADERS
#include <NvInferRuntime.h>
#else
#include "abi/nv_infer.h"
#endif
