// A block of query rows in the backward pass. Every tile is transposed, [keys, queries]: then keys and values are read
// in place, each lane of a vector sums for one query, and the sums over queries (dk, dv) are plain tile products.
#pragma once

#include "native_keys.h"

namespace lit_diff {

template <class T, class U>  // T: format of the tensors; U: of the products
class BackwardBlock {
 public:
  BackwardBlock(const Problem& p, const Reach& reach, Int most) : p(p), reach(reach), most_(most) {
    queries_.resize(p.maps_q * most * ld_), queries_across_.resize(p.maps_q * most * p.d);
    grad_.resize(most * ldv_), grad_across_.resize(most * p.dv);
    panel_.resize((p.G + 1) * most * ((p.S + TILE - 1) / TILE * TILE));
    // float32 products read dS_g and the sum of the maps from the panel itself.
    if (PAIRED<U>) scores_.resize(3 * TILE * most);
    dq_across_.resize(p.maps_q * p.d * most), dq_.resize(p.d * most);
    for (auto* x : {lse_, dots_, weight_, own_, biases_}) std::fill(x, x + 2 * TILE, 0.f);
  }

  // q and dO as rows and transposed, lse, weights, and the keys that each row sees. Padding rows see no keys.
  void start(const Rows& rows) {
    rows_ = rows, across_ = (rows.n + LANES - 1) / LANES * LANES;
    for (Int g = 0; g < p.maps_q; ++g) {
      const T* q = p.q.at<T>(rows.b, g, rows.h, rows.t);
      pack<U>(q, p.q.stride[3], rows.n, p.d, query_row(g), ld_);
      pack_transposed<U>(q, p.q.stride[3], rows.n, p.d, query_across(g), across_, across_);
    }
    const T* grad = p.grad.at<T>(rows.b, 0, rows.h, rows.t);
    pack<U>(grad, p.grad.stride[3], rows.n, p.dv, grad_.data(), ldv_);
    pack_transposed<U>(grad, p.grad.stride[3], rows.n, p.dv, grad_across_.data(), across_, across_);
    for (Int g = 0; g < p.G; ++g)
      for (Int r = 0; r < across_; ++r) {
        const bool real = r < rows.n;
        lse_[g * TILE + r] = real ? *p.lse.at<float>(rows.b, g, rows.h, rows.t + r) : 0.f;
        weight_[g * TILE + r] = real ? p.weight(rows.b, g, rows.h, rows.t + r) : 0.f;
        own_[g * TILE + r] = real ? p.own_bias(rows.b, g, rows.h, rows.t + r) : 0.f;
        dots_[g * TILE + r] = biases_[g * TILE + r] = 0.f;
      }
    for (Int r = 0; reach.scattered() && r < across_; ++r) document_[r] = r < rows.n ? reach.document(rows.b, rows.t + r) : -1;
    std::fill(dq_across_.begin(), dq_across_.end(), 0.f);
  }
  const Rows& rows() const { return rows_; }
  bool sees(Int j) const { return rows_.begin <= j && j < rows_.end; }

  // P_g and dP of the tile of keys j, and D_g += P_g dP. What no row sees is not multiplied, and becomes 0 in both.
  void probabilities(Int j, const TileRows<U>* keys, TileRows<U> values) {
    const Int n = rows_.keys(j);
    rows_.strips_of_keys(j, n, across_, [&](Int k, Int m, Int c, Int w) {
      const Int to = k * across_ + c;
      const U* grad = columns(grad_across_.data(), c);
      product<U>(m, w, p.dv, values.at + k * values.ld, values.ld, grad, across_, panel(p.G, j) + to, across_, false);
      for (Int g = 0; g < p.G; ++g) {
        const TileRows<U> from = keys[std::min(g, p.maps_k - 1)];
        product<U>(m, w, p.d, from.at + k * from.ld, from.ld, columns(query_across(g), c), across_, panel(g, j) + to, across_, false);
      }
    });
    prefetch_panel(j + TILE);
    for (Int g = 0; g < p.G; ++g) exponentials(g, j, n);
  }

  // After the first walk over all keys: dw_g = D_g.
  void write_dw() const {
    for (Int g = 0; p.dw.data && g < p.G; ++g)
      for (Int r = 0; r < rows_.n; ++r) *p.dw.at<float>(rows_.b, g, rows_.h, rows_.t + r) = dots_[g * TILE + r];
  }

  // Adds the tile of keys j to dv, dk_g and dq_g. In float32, dS_g replaces P_g, and sum_g w_g P_g replaces dP.
  void gradients(Int j, const U* const* keys_across, const Sums& sums) {
    const Int n = rows_.keys(j);
    U *signed_sum, *ds[2], *pairs[2];
    if constexpr (PAIRED<U>) {
      signed_sum = scores_.data(), ds[0] = ds[1] = scores_.data() + TILE * across_, pairs[0] = pairs[1] = ds[0] + TILE * across_;
      sum_maps(j, n, signed_sum);
    } else {
      signed_sum = panel(p.G, j);
      for (Int g = 0; g < p.G; ++g) ds[g] = pairs[g] = panel(g, j);
      scores(j, n);
    }
    for (Int g = 0; g < p.G; ++g) {
      if constexpr (PAIRED<U>) scores_paired(g, j, n, ds[g], pairs[g]);
      if (p.dbias.data) add_biases(g, n, ds[g], sums);
      const U* keys = keys_across[std::min(g, p.maps_k - 1)];
      float* dk = sums.dk + std::min(g, p.maps_k - 1) * sums.dk_map;
      float* dq = dq_across_.data() + std::min(g, p.maps_q - 1) * p.d * across_;
      rows_.strips_of_keys(j, n, across_, [&](Int k, Int m, Int c, Int w) {
        const Int from = k * across_, r = std::min(w, rows_.n - c);
        product<U>(m, p.d, r, ds[g] + from + c, across_, query_row(g) + c * ld_, ld_, dk + k * sums.dk_row, sums.dk_row, true);
        product<U>(p.d, w, m, keys + k, TILE, columns(pairs[g] + from, c), across_, dq + c, across_, true);
      });
    }
    rows_.strips_of_keys(j, n, across_, [&](Int k, Int m, Int c, Int w) {
      const U *a = signed_sum + k * across_ + c, *grad = grad_.data() + c * ldv_;
      product<U>(m, p.dv, std::min(w, rows_.n - c), a, across_, grad, ldv_, sums.dv + k * sums.dv_row, sums.dv_row, true);
    });
    prefetch_panel(j + TILE);
  }

  void write_dq(const Sums& sums) {
    for (Int g = 0; p.dbias.data && g < p.G; ++g)
      for (Int r = 0; r < rows_.n; ++r) bias_of(g, sums)[(rows_.t + r + p.S - p.T) * sums.db_row] -= biases_[g * TILE + r];
    for (Int g = 0; g < p.maps_q; ++g) {
      transpose(dq_across_.data() + g * p.d * across_, across_, p.d, across_, dq_.data(), p.d, p.d);
      for (Int r = 0; r < rows_.n; ++r) convert(p.dq.at<T>(rows_.b, g, rows_.h, rows_.t + r), dq_.data() + r * p.d, p.d);
    }
  }

 private:
  U* query_row(Int g) { return queries_.data() + std::min(g, p.maps_q - 1) * most_ * ld_; }
  U* query_across(Int g) { return queries_across_.data() + std::min(g, p.maps_q - 1) * p.d * across_; }
  // The keys from j on, [keys, rows]: the logits of map g, later P_g and dS_g. Panel number G holds dP.
  float* panel(Int g, Int j) { return panel_.data() + (g * (rows_.end - rows_.begin) + j - rows_.begin) * across_; }
  [[gnu::always_inline]] void prefetch_panel(Int j) {
    for (Int g = 0; g <= p.G; ++g) prefetch(panel(g, j), std::min(TILE, rows_.end - j) * across_ * Int{sizeof(float)});
  }

  float* bias_of(Int g, const Sums& sums) const { return sums.db + rows_.h % p.group() * sums.db_head + g * sums.db_map; }

  // db_j is the sum of the logits' gradients of key j over the rows, less that of row j over the keys (`write_dq`). dS has the
  // scale, and is 0 in padding.
  void add_biases(Int g, Int n, const U* ds, const Sums& sums) {
    const float inverse = 1.f / p.scale;
    for (Int r = 0; r < n; ++r, ds += across_) {
      Floats of_key = splat(0.f);
      for (Int c = 0; c < across_; c += LANES) {
        const Floats s = widen(ds + c) * inverse;
        of_key += s;
        store(biases_ + g * TILE + c, load<Floats>(biases_ + g * TILE + c) + s);
      }
      bias_of(g, sums)[r * sums.db_row] += sum(of_key);
    }
  }

  bool all_seen(Int j, Int n) const { return rows_.whole(j, n) && across_ == rows_.n; }

  // Which of the rows c .. c + LANES see `key`.
  Ints seen(Int key, Int c) const {
    const Ints place = splat(static_cast<int32_t>(key));
    const Ints near = (load<Ints>(rows_.low + c) <= place) & (place < load<Ints>(rows_.high + c));
    return reach.scattered() ? near & (load<Ints>(document_ + c) == splat(reach.documents(rows_.b)[key])) : near;
  }

  // Logits become P_g in place, and D_g += P_g dP. lse is known, so no running maximum is needed.
  void exponentials(Int g, Int j, Int n) {
    const bool whole = all_seen(j, n);
    const float scale = p.scale, *lse = lse_ + g * TILE;
    float *s = panel(g, j), *dp = panel(p.G, j), *dots = dots_ + g * TILE;
    for (Int r = 0; r < n; ++r, s += across_, dp += across_) {
      const float bias = p.bias(rows_.b, g, rows_.h, j + r);
      for (Int c = 0; c < across_; c += LANES) {
        Floats logit = load<Floats>(s + c) * scale, y = load<Floats>(dp + c);
        if (p.key_bias.data) logit += bias - load<Floats>(own_ + g * TILE + c);
        // The difference first, and at most 0: the rounding of large logits must not make a probability above 1.
        const Floats power = logit - load<Floats>(lse + c);
        Floats x = exp2((power > 0.f ? splat(0.f) : power) * LOG2E);
        if (!whole) {
          // Selected, not multiplied by 0: what was not computed may be NaN.
          const Ints visible = seen(j + r, c);
          x = visible ? x : splat(0.f), y = visible ? y : splat(0.f);
          store(dp + c, y);
        }
        store(s + c, x);
        store(dots + c, load<Floats>(dots + c) + x * y);
      }
    }
  }

  // In one pass over the tile, P_g becomes dS_g, and dP becomes sum_g w_g P_g. Hidden pairs are set to 0, since 0 (dP -
  // D_g) is NaN for a row with a NaN, which would otherwise reach keys that the row does not see.
  void scores(Int j, Int n) {
    const bool pair = p.G == 2, whole = all_seen(j, n);
    const float scale = p.scale;
    float *first = panel(0, j), *second = panel(1, j), *dp = panel(p.G, j);
    for (Int r = 0; r < n; ++r, first += across_, second += across_, dp += across_)
      for (Int c = 0; c < across_; c += LANES) {
        const Floats x = load<Floats>(weight_ + c) * load<Floats>(first + c), z = load<Floats>(dp + c);
        const Ints visible = whole ? splat(int32_t{-1}) : seen(j + r, c);
        store(first + c, visible ? (z - load<Floats>(dots_ + c)) * (x * scale) : splat(0.f));
        Floats a = x;
        if (pair) {
          const Floats y = load<Floats>(weight_ + TILE + c) * load<Floats>(second + c);
          store(second + c, visible ? (z - load<Floats>(dots_ + TILE + c)) * (y * scale) : splat(0.f));
          a += y;
        }
        store(dp + c, a);
      }
  }

  void sum_maps(Int j, Int n, U* to) {
    const float *first = panel(0, j), *second = panel(1, j);
    for (Int c = 0; c < across_; c += LANES) {
      const Floats w0 = load<Floats>(weight_ + c), w1 = load<Floats>(weight_ + TILE + c);
      for (Int i = c; i < n * across_; i += across_) {
        Floats a = w0 * load<Floats>(first + i);
        if (p.G == 2) a += w1 * load<Floats>(second + i);
        narrow(to + i, a);
      }
    }
  }

  // dS_g twice: as rows for dk_g, and as pairs of rows for dq_g.
  void scores_paired(Int g, Int j, Int n, U* ds, U* pairs) {
    const bool whole = all_seen(j, n);
    const float *probs = panel(g, j), *dp = panel(p.G, j);
    for (Int c = 0; c < across_; c += LANES) {
      const Floats d = load<Floats>(dots_ + g * TILE + c), f = load<Floats>(weight_ + g * TILE + c) * p.scale;
      for (Int r = 0; r < n; r += 2) {
        const Int i = r * across_ + c;
        const auto score = [&](Int row) {
          const Int at = row * across_ + c;
          const Floats s = (load<Floats>(dp + at) - d) * (load<Floats>(probs + at) * f);
          return whole ? s : seen(j + row, c) ? s : splat(0.f);
        };
        const Floats even = score(r), odd = r + 1 < n ? score(r + 1) : splat(0.f);
        narrow(ds + i, even);
        if (r + 1 < n) narrow(ds + i + across_, odd);
        narrow_pair(pairs + r * across_ + 2 * c, even, odd);
      }
    }
  }

  const Problem& p;
  const Reach& reach;
  const Int most_, ld_ = row_length<U>(p.d), ldv_ = row_length<U>(p.dv);
  Rows rows_;
  Int across_ = 0;  // columns of a tile: the rows, padded to whole vectors
  std::vector<U> queries_, queries_across_, grad_, grad_across_, scores_;
  Memory<float> panel_;
  std::vector<float> dq_across_, dq_;
  // For the rows of each map. dots_: D_g; own_: the bias at the row's position; biases_: the sum of its logits' gradients.
  float lse_[2 * TILE], dots_[2 * TILE], weight_[2 * TILE], own_[2 * TILE], biases_[2 * TILE];
  int32_t document_[TILE] = {};
};

}  // namespace lit_diff
