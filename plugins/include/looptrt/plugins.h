// C API of liblooptrt_plugins.so: the kernels' launchers on raw device pointers.
//
// Every launcher enqueues on `stream` and returns a cudaError_t as an int, 0 when all went well;
// looptrt_last_error_text() then says what this thread's last failed call was told. Layouts and
// exactness stand at the launchers in plugins/kernels/. `dtype` is 0 float32, 1 bfloat16 or
// 2 float16.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LOOPTRT_API __attribute__((visibility("default")))

// Raised with every change of a signature below.
#define LOOPTRT_PLUGINS_ABI 4

LOOPTRT_API int looptrt_abi_version(void);
LOOPTRT_API char const* looptrt_last_error_text(void);

// Rows of the largest calls of norms, rope, silu-mul and compaction that may start before their
// predecessors have ended, 0 at first. Faster between kernels of this library, slower after
// cuBLAS's; changes no bits.
LOOPTRT_API void looptrt_let_kernels_overlap(int32_t most_rows);

LOOPTRT_API int looptrt_fenced_rms_norm(void* y, void const* x, void const* weight,
                                        int64_t num_tokens, int32_t hidden, float eps,
                                        int32_t dtype, void* stream);
LOOPTRT_API int looptrt_fenced_add_rms_norm(void* y, void const* x, void const* residual,
                                            void const* weight, int64_t num_tokens, int32_t hidden,
                                            float eps, int32_t dtype, void* stream);
LOOPTRT_API int looptrt_fenced_rms_norm_add_rms_norm(void* h, void* y, void const* x,
                                                     void const* residual, void const* weight,
                                                     void const* next_weight, int64_t num_tokens,
                                                     int32_t hidden, float eps, int32_t dtype,
                                                     void* stream);
LOOPTRT_API int looptrt_fenced_add_rms_norm_rms_norm(void* h, void* y, void const* x,
                                                     void const* residual, void const* weight,
                                                     void const* next_weight, int64_t num_tokens,
                                                     int32_t hidden, float eps, int32_t dtype,
                                                     void* stream);
LOOPTRT_API int looptrt_fenced_qk_norm(void* normed, void const* qkv, void const* q_weight,
                                       void const* k_weight, int64_t num_tokens, int32_t q_width,
                                       int32_t k_width, float eps, int32_t dtype, void* stream);

// bias may be null: fenced_rope; else fenced_bias_rope.
LOOPTRT_API int looptrt_fenced_rope(void* rotated, void const* qkv, void const* bias,
                                    int32_t const* positions, void const* cos, void const* sin,
                                    int64_t num_tokens, int64_t max_positions, int32_t num_heads,
                                    int32_t num_kv_heads, int32_t head_dim, int32_t interleaved,
                                    int32_t dtype, int32_t table_dtype, void* stream);
LOOPTRT_API int looptrt_fenced_silu_mul(void* y, void const* gate_up, int64_t num_tokens,
                                        int32_t width, int32_t dtype, void* stream);

// Grows with every size: the bytes for the largest shapes serve all smaller ones.
LOOPTRT_API int64_t looptrt_packed_plane_attention_workspace_bytes(
    int64_t num_rows, int32_t num_sequences, int32_t max_pages, int32_t num_heads,
    int32_t num_kv_heads, int32_t head_dim, int32_t page_size, int32_t dtype);
LOOPTRT_API int looptrt_packed_plane_attention(
    void* attended, void const* qkv, int32_t const* positions, int32_t const* cu_seqlens,
    int32_t const* seq_slots, int32_t const* block_table, int64_t const* kv_pool,
    int32_t const* plane, void* workspace, int64_t num_rows, int32_t num_sequences,
    int32_t max_slots, int32_t table_rows, int32_t max_pages, int32_t num_heads,
    int32_t num_kv_heads, int32_t head_dim, int32_t page_size, int32_t unit_slots, int32_t row,
    int32_t slot, float scale, int32_t dtype, void* stream);

LOOPTRT_API int looptrt_compact_gather(void* gathered, void const* x, int32_t const* rows,
                                       int64_t num_tokens, int64_t num_rows, int32_t hidden,
                                       int32_t dtype, void* stream);
LOOPTRT_API int looptrt_compact_scatter(void* scattered, void const* x, void const* update,
                                        int32_t const* rows, int64_t num_tokens, int64_t num_rows,
                                        int32_t hidden, int32_t dtype, void* stream);
LOOPTRT_API int looptrt_position_keyed_noise(void* noise, int32_t const* positions,
                                             int64_t const* seeds, int64_t num_tokens,
                                             int32_t hidden, float std, float scale, int32_t dtype,
                                             void* stream);

// Between a kernel that writes weight and this one there must be one on the stream that starts
// after its predecessor has ended, as every kernel of another library does.
LOOPTRT_API int looptrt_skinny_linear(void* y, void const* x, void const* weight, int64_t num_rows,
                                      int32_t outputs, int32_t inputs, int32_t dtype, void* stream);

LOOPTRT_API int looptrt_sample(int32_t* tokens, int32_t* failed, void const* logits,
                               double const* temperatures, int32_t const* top_ks,
                               double const* top_ps, double const* min_ps, int64_t const* seeds,
                               int32_t const* positions, int64_t num_rows, int32_t vocab,
                               int32_t dtype, void* stream);

LOOPTRT_API int64_t looptrt_plane_copy_workspace_bytes(int64_t num_copies, int32_t unit_slots,
                                                       int32_t page_size, int32_t token_bytes);
LOOPTRT_API int looptrt_plane_copy(int64_t const* kv_pool, int32_t const* src_units,
                                   int32_t const* dst_units, int32_t const* token_begin,
                                   int32_t const* token_end, void* workspace, int64_t num_copies,
                                   int32_t unit_slots, int32_t page_size, int32_t token_bytes,
                                   void* stream);
LOOPTRT_API int looptrt_update_tables(int32_t* block_table, int32_t const* slots,
                                      int32_t const* pages, int32_t const* units,
                                      int64_t num_updates, int32_t max_slots, int32_t num_rows,
                                      int32_t max_pages, void* stream);

#ifdef __cplusplus
}
#endif
