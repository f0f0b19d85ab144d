// The C API: fills params structs and turns a cudaError_t into a code and a text. No logic.
#include <cuda_runtime_api.h>

#include <string>

#include "compact.cuh"
#include "fenced_rms_norm.cuh"
#include "fenced_rope.cuh"
#include "fenced_silu_mul.cuh"
#include "looptrt/overlap.h"
#include "looptrt/plugins.h"
#include "packed_plane_attention.cuh"
#include "plane_copy.cuh"
#include "position_keyed_noise.cuh"
#include "sampling.cuh"
#include "skinny_linear.cuh"
#include "update_tables.cuh"

namespace {

using looptrt::DType;
using looptrt::NormForm;

thread_local std::string last_error_text;

int report(cudaError_t error) {
  if (error != cudaSuccess) {
    last_error_text = std::string(cudaGetErrorName(error)) + ": " + cudaGetErrorString(error);
  }
  return error;
}

cudaStream_t asStream(void* stream) { return static_cast<cudaStream_t>(stream); }

int norm(NormForm form, looptrt::FencedRmsNormParams p, void* stream) {
  p.row_stride = p.hidden;
  return report(looptrt::launchFencedRmsNorm(form, p, asStream(stream)));
}

}  // namespace

int looptrt_abi_version() { return LOOPTRT_PLUGINS_ABI; }

char const* looptrt_last_error_text() { return last_error_text.c_str(); }

void looptrt_let_kernels_overlap(int32_t most_rows) { looptrt::most_overlapping_rows = most_rows; }

int looptrt_fenced_rms_norm(void* y, void const* x, void const* weight, int64_t num_tokens,
                            int32_t hidden, float eps, int32_t dtype, void* stream) {
  looptrt::FencedRmsNormParams p{};
  p.y = y;
  p.x = x;
  p.weight = weight;
  p.num_tokens = num_tokens;
  p.hidden = hidden;
  p.eps = eps;
  p.dtype = static_cast<DType>(dtype);
  return norm(NormForm::kNorm, p, stream);
}

int looptrt_fenced_add_rms_norm(void* y, void const* x, void const* residual, void const* weight,
                                int64_t num_tokens, int32_t hidden, float eps, int32_t dtype,
                                void* stream) {
  looptrt::FencedRmsNormParams p{};
  p.y = y;
  p.x = x;
  p.residual = residual;
  p.weight = weight;
  p.num_tokens = num_tokens;
  p.hidden = hidden;
  p.eps = eps;
  p.dtype = static_cast<DType>(dtype);
  return norm(NormForm::kAddNorm, p, stream);
}

int looptrt_fenced_rms_norm_add_rms_norm(void* h, void* y, void const* x, void const* residual,
                                         void const* weight, void const* next_weight,
                                         int64_t num_tokens, int32_t hidden, float eps,
                                         int32_t dtype, void* stream) {
  looptrt::FencedRmsNormParams p{};
  p.y = y;
  p.h = h;
  p.x = x;
  p.residual = residual;
  p.weight = weight;
  p.next_weight = next_weight;
  p.num_tokens = num_tokens;
  p.hidden = hidden;
  p.eps = eps;
  p.dtype = static_cast<DType>(dtype);
  return norm(NormForm::kNormAddNorm, p, stream);
}

int looptrt_fenced_add_rms_norm_rms_norm(void* h, void* y, void const* x, void const* residual,
                                         void const* weight, void const* next_weight,
                                         int64_t num_tokens, int32_t hidden, float eps,
                                         int32_t dtype, void* stream) {
  looptrt::FencedRmsNormParams p{};
  p.y = y;
  p.h = h;
  p.x = x;
  p.residual = residual;
  p.weight = weight;
  p.next_weight = next_weight;
  p.num_tokens = num_tokens;
  p.hidden = hidden;
  p.eps = eps;
  p.dtype = static_cast<DType>(dtype);
  return norm(NormForm::kAddNormNorm, p, stream);
}

int looptrt_fenced_qk_norm(void* normed, void const* qkv, void const* q_weight,
                           void const* k_weight, int64_t num_tokens, int32_t q_width,
                           int32_t k_width, float eps, int32_t dtype, void* stream) {
  looptrt::FencedQkNormParams p{};
  p.normed = normed;
  p.qkv = qkv;
  p.q_weight = q_weight;
  p.k_weight = k_weight;
  p.num_tokens = num_tokens;
  p.q_width = q_width;
  p.k_width = k_width;
  p.eps = eps;
  p.dtype = static_cast<DType>(dtype);
  return report(looptrt::launchFencedQkNorm(p, asStream(stream)));
}

int looptrt_fenced_rope(void* rotated, void const* qkv, void const* bias, int32_t const* positions,
                        void const* cos, void const* sin, int64_t num_tokens, int64_t max_positions,
                        int32_t num_heads, int32_t num_kv_heads, int32_t head_dim,
                        int32_t interleaved, int32_t dtype, int32_t table_dtype, void* stream) {
  looptrt::FencedRopeParams p{};
  p.rotated = rotated;
  p.qkv = qkv;
  p.bias = bias;
  p.positions = positions;
  p.cos = cos;
  p.sin = sin;
  p.num_tokens = num_tokens;
  p.max_positions = max_positions;
  p.num_heads = num_heads;
  p.num_kv_heads = num_kv_heads;
  p.head_dim = head_dim;
  p.is_interleaved = interleaved != 0;
  p.dtype = static_cast<DType>(dtype);
  p.table_dtype = static_cast<DType>(table_dtype);
  return report(looptrt::launchFencedRope(p, asStream(stream)));
}

int looptrt_fenced_silu_mul(void* y, void const* gate_up, int64_t num_tokens, int32_t width,
                            int32_t dtype, void* stream) {
  looptrt::FencedSiluMulParams p{};
  p.y = y;
  p.gate_up = gate_up;
  p.num_tokens = num_tokens;
  p.width = width;
  p.dtype = static_cast<DType>(dtype);
  return report(looptrt::launchFencedSiluMul(p, asStream(stream)));
}

int64_t looptrt_packed_plane_attention_workspace_bytes(int64_t num_rows, int32_t num_sequences,
                                                       int32_t max_pages, int32_t num_heads,
                                                       int32_t num_kv_heads, int32_t head_dim,
                                                       int32_t page_size, int32_t dtype) {
  looptrt::PackedPlaneAttentionParams p{};
  p.num_rows = num_rows;
  p.num_sequences = num_sequences;
  p.max_pages = max_pages;
  p.num_heads = num_heads;
  p.num_kv_heads = num_kv_heads;
  p.head_dim = head_dim;
  p.page_size = page_size;
  p.dtype = static_cast<DType>(dtype);
  return static_cast<int64_t>(looptrt::packedPlaneAttentionWorkspaceBytes(p));
}

int looptrt_packed_plane_attention(void* attended, void const* qkv, int32_t const* positions,
                                   int32_t const* cu_seqlens, int32_t const* seq_slots,
                                   int32_t const* block_table, int64_t const* kv_pool,
                                   int32_t const* plane, void* workspace, int64_t num_rows,
                                   int32_t num_sequences, int32_t max_slots, int32_t table_rows,
                                   int32_t max_pages, int32_t num_heads, int32_t num_kv_heads,
                                   int32_t head_dim, int32_t page_size, int32_t unit_slots,
                                   int32_t row, int32_t slot, float scale, int32_t dtype,
                                   void* stream) {
  looptrt::PackedPlaneAttentionParams p{};
  p.attended = attended;
  p.qkv = qkv;
  p.positions = positions;
  p.cu_seqlens = cu_seqlens;
  p.seq_slots = seq_slots;
  p.block_table = block_table;
  p.kv_pool = kv_pool;
  p.plane = plane;
  p.workspace = workspace;
  p.num_rows = num_rows;
  p.num_sequences = num_sequences;
  p.max_slots = max_slots;
  p.table_rows = table_rows;
  p.max_pages = max_pages;
  p.num_heads = num_heads;
  p.num_kv_heads = num_kv_heads;
  p.head_dim = head_dim;
  p.page_size = page_size;
  p.unit_slots = unit_slots;
  p.row = row;
  p.slot = slot;
  p.scale = scale;
  p.dtype = static_cast<DType>(dtype);
  return report(looptrt::launchPackedPlaneAttention(p, asStream(stream)));
}

int looptrt_compact_gather(void* gathered, void const* x, int32_t const* rows, int64_t num_tokens,
                           int64_t num_rows, int32_t hidden, int32_t dtype, void* stream) {
  looptrt::CompactGatherParams p{};
  p.gathered = gathered;
  p.x = x;
  p.rows = rows;
  p.num_tokens = num_tokens;
  p.num_rows = num_rows;
  p.hidden = hidden;
  p.dtype = static_cast<DType>(dtype);
  return report(looptrt::launchCompactGather(p, asStream(stream)));
}

int looptrt_compact_scatter(void* scattered, void const* x, void const* update, int32_t const* rows,
                            int64_t num_tokens, int64_t num_rows, int32_t hidden, int32_t dtype,
                            void* stream) {
  looptrt::CompactScatterParams p{};
  p.scattered = scattered;
  p.x = x;
  p.update = update;
  p.rows = rows;
  p.num_tokens = num_tokens;
  p.num_rows = num_rows;
  p.hidden = hidden;
  p.dtype = static_cast<DType>(dtype);
  return report(looptrt::launchCompactScatter(p, asStream(stream)));
}

int looptrt_position_keyed_noise(void* noise, int32_t const* positions, int64_t const* seeds,
                                 int64_t num_tokens, int32_t hidden, float std, float scale,
                                 int32_t dtype, void* stream) {
  looptrt::PositionKeyedNoiseParams p{};
  p.noise = noise;
  p.positions = positions;
  p.seeds = seeds;
  p.num_tokens = num_tokens;
  p.hidden = hidden;
  p.std = std;
  p.scale = scale;
  p.dtype = static_cast<DType>(dtype);
  return report(looptrt::launchPositionKeyedNoise(p, asStream(stream)));
}

int looptrt_skinny_linear(void* y, void const* x, void const* weight, int64_t num_rows,
                          int32_t outputs, int32_t inputs, int32_t dtype, void* stream) {
  looptrt::SkinnyLinearParams p{};
  p.y = y;
  p.x = x;
  p.weight = weight;
  p.num_rows = num_rows;
  p.outputs = outputs;
  p.inputs = inputs;
  p.dtype = static_cast<DType>(dtype);
  return report(looptrt::launchSkinnyLinear(p, asStream(stream)));
}

int looptrt_sample(int32_t* tokens, int32_t* failed, void const* logits, double const* temperatures,
                   int32_t const* top_ks, double const* top_ps, double const* min_ps,
                   int64_t const* seeds, int32_t const* positions, int64_t num_rows, int32_t vocab,
                   int32_t dtype, void* stream) {
  looptrt::SamplingParams p{};
  p.tokens = tokens;
  p.failed = failed;
  p.logits = logits;
  p.temperatures = temperatures;
  p.top_ks = top_ks;
  p.top_ps = top_ps;
  p.min_ps = min_ps;
  p.seeds = seeds;
  p.positions = positions;
  p.num_rows = num_rows;
  p.vocab = vocab;
  p.dtype = static_cast<DType>(dtype);
  return report(looptrt::launchSampling(p, asStream(stream)));
}

int64_t looptrt_plane_copy_workspace_bytes(int64_t num_copies, int32_t unit_slots,
                                           int32_t page_size, int32_t token_bytes) {
  looptrt::PlaneCopyParams p{};
  p.num_copies = num_copies;
  p.unit_slots = unit_slots;
  p.page_size = page_size;
  p.token_bytes = token_bytes;
  return static_cast<int64_t>(looptrt::planeCopyWorkspaceBytes(p));
}

int looptrt_plane_copy(int64_t const* kv_pool, int32_t const* src_units, int32_t const* dst_units,
                       int32_t const* token_begin, int32_t const* token_end, void* workspace,
                       int64_t num_copies, int32_t unit_slots, int32_t page_size,
                       int32_t token_bytes, void* stream) {
  looptrt::PlaneCopyParams p{};
  p.kv_pool = kv_pool;
  p.src_units = src_units;
  p.dst_units = dst_units;
  p.token_begin = token_begin;
  p.token_end = token_end;
  p.workspace = workspace;
  p.num_copies = num_copies;
  p.unit_slots = unit_slots;
  p.page_size = page_size;
  p.token_bytes = token_bytes;
  return report(looptrt::launchPlaneCopy(p, asStream(stream)));
}

int looptrt_update_tables(int32_t* block_table, int32_t const* slots, int32_t const* pages,
                          int32_t const* units, int64_t num_updates, int32_t max_slots,
                          int32_t num_rows, int32_t max_pages, void* stream) {
  looptrt::UpdateTablesParams p{};
  p.block_table = block_table;
  p.slots = slots;
  p.pages = pages;
  p.units = units;
  p.num_updates = num_updates;
  p.max_slots = max_slots;
  p.num_rows = num_rows;
  p.max_pages = max_pages;
  return report(looptrt::launchUpdateTables(p, asStream(stream)));
}
