// TensorRT's part around the plugins of a library, played for tests: a C API over their C++
// objects.
//
// Owns what TensorRT owns: the logger, the look-up of creators, sizes while a network is built, the
// bytes of serialised fields. Leaves the order of calls and device memory to the caller
// (tests/support/plugin_host.py). Plugins are reached through their virtual functions alone.
// Invariant: a function that fails returns null or a non-zero code and leaves a message.
#pragma once

#include <stdint.h>

#define LOOPTRT_HOST_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

#define LOOPTRT_HOST_MAX_RANK 8

// A tensor as a plugin is told of it. In a step only type, format, rank and dims count.
typedef struct {
  int32_t type;    // nvinfer1::DataType
  int32_t format;  // nvinfer1::TensorFormat
  int32_t rank;
  int64_t dims[LOOPTRT_HOST_MAX_RANK];  // -1: decided by each step
  int64_t min[LOOPTRT_HOST_MAX_RANK], opt[LOOPTRT_HOST_MAX_RANK], max[LOOPTRT_HOST_MAX_RANK];
} LooptrtHostTensor;

typedef struct {
  char const* name;
  void const* data;
  int32_t type;  // nvinfer1::PluginFieldType
  int32_t length;
} LooptrtHostField;

typedef struct LooptrtHostLibrary LooptrtHostLibrary;
typedef struct LooptrtHostPlugin LooptrtHostPlugin;

// What plugins and the host itself have logged since the last call, one message a line, each after
// its severity; valid until the next call of this thread.
LOOPTRT_HOST_API char const* looptrt_host_take_messages(void);

// The value of `operation`, a nvinfer1::DimensionOperation, as expressions of sizes have it.
LOOPTRT_HOST_API int32_t looptrt_host_dimension_operation(int32_t operation, int64_t first,
                                                          int64_t second, int64_t* result);

// Opens a plugin library, gives it the logger and asks it for its creators. It stays open for good.
LOOPTRT_HOST_API LooptrtHostLibrary* looptrt_host_open(char const* path);
LOOPTRT_HOST_API int32_t looptrt_host_num_creators(LooptrtHostLibrary const* library);
LOOPTRT_HOST_API int32_t looptrt_host_creator(LooptrtHostLibrary const* library, int32_t index,
                                              char const** name, char const** version,
                                              char const** name_space, int32_t* num_fields);
LOOPTRT_HOST_API int32_t looptrt_host_creator_field(LooptrtHostLibrary const* library,
                                                    int32_t index, int32_t field, char const** name,
                                                    int32_t* type);

// A plugin for building: what an ONNX parser does for a node.
LOOPTRT_HOST_API LooptrtHostPlugin* looptrt_host_create(LooptrtHostLibrary const* library,
                                                        char const* name, char const* version,
                                                        char const* name_space,
                                                        LooptrtHostField const* fields,
                                                        int32_t num_fields);
// Writes what a plan holds of a plugin into `bytes`, if `capacity` suffices, and returns its size;
// -1 on failure.
LOOPTRT_HOST_API int64_t looptrt_host_serialize(LooptrtHostPlugin* plugin, uint8_t* bytes,
                                                int64_t capacity);
// A plugin for running, from such bytes.
LOOPTRT_HOST_API LooptrtHostPlugin* looptrt_host_restore(LooptrtHostLibrary const* library,
                                                         uint8_t const* bytes, int64_t size);
LOOPTRT_HOST_API LooptrtHostPlugin* looptrt_host_clone(LooptrtHostPlugin* plugin);
LOOPTRT_HOST_API LooptrtHostPlugin* looptrt_host_attach(LooptrtHostPlugin* plugin);
LOOPTRT_HOST_API void looptrt_host_destroy(LooptrtHostPlugin* plugin);

LOOPTRT_HOST_API void looptrt_host_identity(LooptrtHostPlugin const* plugin, char const** name,
                                            char const** version, char const** name_space);
LOOPTRT_HOST_API int32_t looptrt_host_num_outputs(LooptrtHostPlugin const* plugin);
// Fills in the outputs' types.
LOOPTRT_HOST_API int32_t looptrt_host_output_types(LooptrtHostPlugin const* plugin,
                                                   LooptrtHostTensor const* in, int32_t num_inputs,
                                                   LooptrtHostTensor* out, int32_t num_outputs);
// Fills in the outputs' ranks and sizes, evaluated where the inputs' are min, opt and max; dims is
// -1 where a size follows from one that is.
LOOPTRT_HOST_API int32_t looptrt_host_output_shapes(LooptrtHostPlugin* plugin,
                                                    LooptrtHostTensor const* in, int32_t num_inputs,
                                                    LooptrtHostTensor* out, int32_t num_outputs);
// 1 or 0; `in_out` has inputs first.
LOOPTRT_HOST_API int32_t looptrt_host_supports(LooptrtHostPlugin* plugin, int32_t pos,
                                               LooptrtHostTensor const* in_out, int32_t num_inputs,
                                               int32_t num_outputs);
LOOPTRT_HOST_API int32_t looptrt_host_configure(LooptrtHostPlugin* plugin,
                                                LooptrtHostTensor const* in, int32_t num_inputs,
                                                LooptrtHostTensor const* out, int32_t num_outputs);
LOOPTRT_HOST_API int64_t looptrt_host_workspace_bytes(LooptrtHostPlugin const* plugin,
                                                      LooptrtHostTensor const* in,
                                                      int32_t num_inputs,
                                                      LooptrtHostTensor const* out,
                                                      int32_t num_outputs);

LOOPTRT_HOST_API int32_t looptrt_host_on_shape_change(LooptrtHostPlugin* plugin,
                                                      LooptrtHostTensor const* in,
                                                      int32_t num_inputs,
                                                      LooptrtHostTensor const* out,
                                                      int32_t num_outputs);
LOOPTRT_HOST_API int32_t looptrt_host_enqueue(LooptrtHostPlugin* plugin,
                                              LooptrtHostTensor const* in, int32_t num_inputs,
                                              LooptrtHostTensor const* out, int32_t num_outputs,
                                              void const* const* inputs, void* const* outputs,
                                              void* workspace, void* stream);

#ifdef __cplusplus
}
#endif
