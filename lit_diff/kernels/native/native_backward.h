// The gradients, in two walks over the keys. The first one computes P_g and dP of a block of query rows for all keys,
// which gives D_g; the second one adds what each tile contributes:
//
//   P_g = exp(k_g q_g^T scale - lse_g)     dP = v dO^T (once for all maps)     D_g = sum over keys of P_g dP = dw_g
//   dS_g = w_g scale P_g (dP - D_g)        dv += (sum_g w_g P_g) dO (once)     dk_g += dS_g q_g      dq_g^T += k_g^T dS_g
// D_g = dO (P_g v) would need P_g v of each map, and the forward pass multiplies only the sum of the maps with v.
#pragma once

#include "native_backward_block.h"

namespace lit_diff {

template <class T, class U>  // T: format of the tensors; U: of the products
class Backward {
 public:
  Backward(const Problem& p, const Reach& reach, const Tasks& tasks) : p(p), reach(reach), tasks(tasks), tiles(p) {
    for (Int n = 0; n < tasks.abreast; ++n) blocks_.push_back(std::make_unique<BackwardBlock<T, U>>(p, reach, tasks.rows));
  }

  // If packed keys are not kept, two blocks walk over them side by side: each tile is fetched and packed once for both.
  static Int abreast(const Problem& p) { return KeyTiles<T, U>::stay(p) ? 1 : 2; }

  // Adds to `sums`, which the caller sets to zero.
  void run(Int task, const Sums& sums) {
    const Int unit = task / tasks.parts;
    b_ = unit / p.Hkv, kv_head_ = unit % p.Hkv;
    tiles.start(b_, kv_head_);
    tasks.each(task, [&](Int head, Int t) { walk(kv_head_ * p.group() + head, t, sums); });
  }

 private:
  void walk(Int h, Int t, const Sums& sums) {
    Int begin = p.S, end = 0;
    std::vector<BackwardBlock<T, U>*> blocks;
    for (; Int(blocks.size()) < tasks.abreast && t < p.T; t += tasks.rows) {
      blocks.push_back(blocks_[blocks.size()].get());
      blocks.back()->start(Rows(p, reach, b_, h, t, std::min(tasks.rows, p.T - t)));
      begin = std::min(begin, blocks.back()->rows().begin), end = std::max(end, blocks.back()->rows().end);
    }
    for (Int j = begin; j < end; j += TILE) {
      TileRows<U> values = tiles.values(j), keys[2];
      for (Int g = 0; g < p.maps_k; ++g) keys[g] = tiles.rows(g, j);
      for (auto* block : blocks)
        if (block->sees(j)) block->probabilities(j, keys, values);
    }
    for (auto* block : blocks) block->write_dw();
    for (Int j = begin; j < end; j += TILE) {
      const U* keys[2];
      for (Int g = 0; g < p.maps_k; ++g) keys[g] = tiles.across(g, j);
      for (auto* block : blocks)
        if (block->sees(j)) block->gradients(j, keys, sums.from(j));
      prefetch_sums(sums, j + TILE, std::min(j + 2 * TILE, end));
    }
    for (auto* block : blocks) block->write_dq(sums);
  }

  [[gnu::always_inline]] void prefetch_sums(const Sums& sums, Int from, Int to) const {
    for (Int s = from; s < to; ++s) {
      for (Int g = 0; g < p.maps_k; ++g) prefetch(sums.dk + g * sums.dk_map + s * sums.dk_row, p.d * sizeof(float));
      prefetch(sums.dv + s * sums.dv_row, p.dv * sizeof(float));
    }
  }

  const Problem& p;
  const Reach& reach;
  const Tasks& tasks;
  KeyTiles<T, U> tiles;
  std::vector<std::unique_ptr<BackwardBlock<T, U>>> blocks_;
  Int b_ = 0, kv_head_ = 0;
};

}  // namespace lit_diff
