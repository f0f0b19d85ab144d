// The launch of every operator: operands of a checked call into its launcher's params.
#include "compact.cuh"
#include "fenced_rms_norm.cuh"
#include "fenced_rope.cuh"
#include "fenced_silu_mul.cuh"
#include "looptrt/trt_schema.h"
#include "packed_plane_attention.cuh"
#include "plugin_base.h"
#include "position_keyed_noise.cuh"

namespace looptrt::trt {
namespace {

using namespace schema;

// What every form of the norm has.
template <typename Op>
FencedRmsNormParams normParams(Call const& call) {
  FencedRmsNormParams p{};
  p.y = call.output(Op::out::kY);
  p.x = call.input(Op::in::kX);
  p.weight = call.input(Op::in::kWeight);
  p.num_tokens = call.size(Op::size::kT);
  p.row_stride = call.size(Op::size::kH);
  p.hidden = call.size32(Op::size::kH);
  p.eps = call.attributeF(Op::attr::kEps);
  p.dtype = call.dtype();
  return p;
}

cudaError_t rmsNorm(Call const& call) {
  return launchFencedRmsNorm(NormForm::kNorm, normParams<fenced_rms_norm>(call), call.stream());
}

cudaError_t addRmsNorm(Call const& call) {
  using Op = fenced_add_rms_norm;
  FencedRmsNormParams p = normParams<Op>(call);
  p.residual = call.input(Op::in::kResidual);
  return launchFencedRmsNorm(NormForm::kAddNorm, p, call.stream());
}

// One of the two forms with two norms.
template <typename Op, NormForm kForm>
cudaError_t twoRmsNorms(Call const& call) {
  FencedRmsNormParams p = normParams<Op>(call);
  p.h = call.output(Op::out::kH);
  p.residual = call.input(Op::in::kResidual);
  p.next_weight = call.input(Op::in::kNextWeight);
  return launchFencedRmsNorm(kForm, p, call.stream());
}

cudaError_t qkNorm(Call const& call) {
  using Op = fenced_qk_norm;
  FencedQkNormParams p{};
  p.normed = call.output(Op::out::kNormed);
  p.qkv = call.input(Op::in::kQkv);
  p.q_weight = call.input(Op::in::kQWeight);
  p.k_weight = call.input(Op::in::kKWeight);
  p.num_tokens = call.size(Op::size::kT);
  p.q_width = call.size32(Op::size::kQ);
  p.k_width = call.size32(Op::size::kK);
  p.eps = call.attributeF(Op::attr::kEps);
  p.dtype = call.dtype();
  return launchFencedQkNorm(p, call.stream());
}

template <typename Op>
FencedRopeParams ropeParams(Call const& call) {
  FencedRopeParams p{};
  p.rotated = call.output(Op::out::kRotated);
  p.qkv = call.input(Op::in::kQkv);
  p.positions = call.input<int32_t>(Op::in::kPositions);
  p.cos = call.input(Op::in::kCos);
  p.sin = call.input(Op::in::kSin);
  p.num_tokens = call.size(Op::size::kT);
  p.max_positions = call.size(Op::size::kMaxPositions);
  p.num_heads = call.attribute(Op::attr::kNumHeads);
  p.num_kv_heads = call.attribute(Op::attr::kNumKvHeads);
  p.head_dim = call.attribute(Op::attr::kHeadDim);
  p.is_interleaved = call.attribute(Op::attr::kInterleaved) != 0;
  p.dtype = call.dtype();
  p.table_dtype = call.tableDtype();
  return p;
}

cudaError_t rope(Call const& call) {
  return launchFencedRope(ropeParams<fenced_rope>(call), call.stream());
}

cudaError_t biasRope(Call const& call) {
  FencedRopeParams p = ropeParams<fenced_bias_rope>(call);
  p.bias = call.input(fenced_bias_rope::in::kBias);
  return launchFencedRope(p, call.stream());
}

cudaError_t siluMul(Call const& call) {
  using Op = fenced_silu_mul;
  FencedSiluMulParams p{};
  p.y = call.output(Op::out::kY);
  p.gate_up = call.input(Op::in::kGateUp);
  p.num_tokens = call.size(Op::size::kT);
  p.width = call.size32(Op::size::kI);
  p.dtype = call.dtype();
  return launchFencedSiluMul(p, call.stream());
}

cudaError_t gather(Call const& call) {
  using Op = compact_gather;
  CompactGatherParams p{};
  p.gathered = call.output(Op::out::kGathered);
  p.x = call.input(Op::in::kX);
  p.rows = call.input<int32_t>(Op::in::kRows);
  p.num_tokens = call.size(Op::size::kT);
  p.num_rows = call.size(Op::size::kR);
  p.hidden = call.size32(Op::size::kH);
  p.dtype = call.dtype();
  return launchCompactGather(p, call.stream());
}

cudaError_t scatter(Call const& call) {
  using Op = compact_scatter;
  CompactScatterParams p{};
  p.scattered = call.output(Op::out::kScattered);
  p.x = call.input(Op::in::kX);
  p.update = call.input(Op::in::kUpdate);
  p.rows = call.input<int32_t>(Op::in::kRows);
  p.num_tokens = call.size(Op::size::kT);
  p.num_rows = call.size(Op::size::kR);
  p.hidden = call.size32(Op::size::kH);
  p.dtype = call.dtype();
  return launchCompactScatter(p, call.stream());
}

cudaError_t noise(Call const& call) {
  using Op = position_keyed_noise;
  PositionKeyedNoiseParams p{};
  p.noise = call.output(Op::out::kNoise);
  p.positions = call.input<int32_t>(Op::in::kPositions);
  p.seeds = call.input<int64_t>(Op::in::kSeeds);
  p.num_tokens = call.size(Op::size::kT);
  p.hidden = call.size32(Op::size::kH);
  p.std = call.attributeF(Op::attr::kStd);
  p.scale = call.attributeF(Op::attr::kScale);
  p.dtype = call.dtype();
  return launchPositionKeyedNoise(p, call.stream());
}

PackedPlaneAttentionParams attentionParams(Call const& call) {
  using Op = packed_plane_attention;
  PackedPlaneAttentionParams p{};
  p.num_rows = call.size(Op::size::kR);
  p.num_sequences = call.size32(Op::size::kN);
  p.max_slots = call.size32(Op::size::kMaxSlots);
  p.table_rows = call.size32(Op::size::kNumRows);
  p.max_pages = call.size32(Op::size::kMaxPages);
  p.num_heads = call.attribute(Op::attr::kNumHeads);
  p.num_kv_heads = call.attribute(Op::attr::kNumKvHeads);
  p.head_dim = call.attribute(Op::attr::kHeadDim);
  p.page_size = call.attribute(Op::attr::kPageSize);
  p.unit_slots = call.attribute(Op::attr::kUnitSlots);
  p.row = call.attribute(Op::attr::kRow);
  p.slot = call.attribute(Op::attr::kSlot);
  p.scale = call.attributeF(Op::attr::kScale);
  p.dtype = call.dtype();
  return p;
}

cudaError_t attention(Call const& call) {
  using Op = packed_plane_attention;
  PackedPlaneAttentionParams p = attentionParams(call);
  p.attended = call.output(Op::out::kAttended);
  p.qkv = call.input(Op::in::kQkv);
  p.positions = call.input<int32_t>(Op::in::kPositions);
  p.cu_seqlens = call.input<int32_t>(Op::in::kCuSeqlens);
  p.seq_slots = call.input<int32_t>(Op::in::kSeqSlots);
  p.block_table = call.input<int32_t>(Op::in::kBlockTable);
  p.kv_pool = call.input<int64_t>(Op::in::kKvPool);
  p.plane = call.input<int32_t>(Op::in::kPlane);
  p.workspace = call.workspace();
  return launchPackedPlaneAttention(p, call.stream());
}

size_t attentionWorkspaceBytes(Call const& call) {
  return packedPlaneAttentionWorkspaceBytes(attentionParams(call));
}

}  // namespace

Adapter const kAdapters[] = {
    {fenced_rms_norm::kOp, rmsNorm, nullptr},
    {fenced_add_rms_norm::kOp, addRmsNorm, nullptr},
    {fenced_rms_norm_add_rms_norm::kOp,
     twoRmsNorms<fenced_rms_norm_add_rms_norm, NormForm::kNormAddNorm>, nullptr},
    {fenced_add_rms_norm_rms_norm::kOp,
     twoRmsNorms<fenced_add_rms_norm_rms_norm, NormForm::kAddNormNorm>, nullptr},
    {fenced_qk_norm::kOp, qkNorm, nullptr},
    {fenced_rope::kOp, rope, nullptr},
    {fenced_bias_rope::kOp, biasRope, nullptr},
    {fenced_silu_mul::kOp, siluMul, nullptr},
    {packed_plane_attention::kOp, attention, attentionWorkspaceBytes},
    {compact_gather::kOp, gather, nullptr},
    {compact_scatter::kOp, scatter, nullptr},
    {position_keyed_noise::kOp, noise, nullptr},
};
static_assert(sizeof kAdapters / sizeof kAdapters[0] == kNumOps);

}  // namespace looptrt::trt
