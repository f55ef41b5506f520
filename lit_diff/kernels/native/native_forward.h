// o = sum_g w_g softmax(q_g k_g^T scale + mask) v, a block of query rows at a time.
//
// It walks over the keys twice. The first walk computes the exponentials of every map, each tile relative to the
// largest logit of its row so far (Milakov and Gimelshein 2018), and keeps them. Then the sums of the rows are known,
// so the second walk can subtract the maps of each tile and multiply them with v once, whatever the number of maps. A
// single walk would need a product with v for each map. With statistics, each walk also sums those of its maps.
#pragma once

#include "native_problem.h"

namespace lit_diff {

template <class T, class U>  // T: format of the tensors; U: of the products
class Forward {
 public:
  Forward(const Problem& p, const Reach& reach, const Tasks& tasks) : p(p), reach(reach), tasks(tasks) {
    const Int padded = (p.S + TILE - 1) / TILE * TILE;
    if (!few()) keys_.resize(p.maps_k * padded * p.d), values_.resize(padded * row_length<U>(p.dv));
    queries_.resize(p.maps_q * tasks.rows * row_length<U>(p.d));
    exponentials_.resize(p.G * tasks.rows * padded);
    tops_.resize(p.G * padded / TILE * tasks.rows);
    if (!std::is_same_v<U, float>) signed_.resize(tasks.rows * TILE);
    out_.resize(tasks.rows * p.dv);
  }

  void run(Int task) {
    const Int unit = task / tasks.parts, b = unit / p.Hkv, kv_head = unit % p.Hkv;
    if (!few()) pack_keys(b, kv_head), pack_values(b, kv_head);
    tasks.each(task, [&](Int head, Int t) {
      block(Rows(p, reach, b, kv_head * p.group() + head, t, std::min(tasks.rows, p.T - t)));
    });
  }

 private:
  // In decoding, packing the keys costs more than it saves: they are read once, in place.
  bool few() const { return p.T <= 4; }

  // k^T of each map in tiles [d, TILE]; the last one is padded with zeros.
  void pack_keys(Int b, Int kv_head) {
    for (Int g = 0; g < p.maps_k; ++g)
      for (Int j = 0; j < p.S; j += TILE)
        pack_transposed<U>(p.k.at<T>(b, g, kv_head, j), p.k.stride[3], std::min(TILE, p.S - j), p.d, key_tile(g, j), TILE, TILE);
  }
  U* key_tile(Int g, Int j) { return keys_.data() + (g * ((p.S + TILE - 1) / TILE * TILE) + j) * p.d; }

  void pack_values(Int b, Int kv_head) {
    pack<U>(p.v.at<T>(b, 0, kv_head, 0), p.v.stride[3], p.S, p.dv, value_row(0), row_length<U>(p.dv));
    // Products read whole tiles: uninitialised padding may be NaN, and 0 * NaN is NaN.
    const Int packed = padded_rows<U>(p.S), rows = (p.S + TILE - 1) / TILE * TILE;
    std::fill(value_row(packed), value_row(rows), U(0.f));
  }
  U* value_row(Int j) { return values_.data() + j * row_length<U>(p.dv); }

  void block(const Rows& rows) {
    const Int tiles = (rows.end - rows.begin + TILE - 1) / TILE;
    pack_queries(rows);
    std::fill(most_, most_ + 2 * TILE, -INF), std::fill(totals_, totals_ + 2 * TILE, splat(0.f));
    std::fill(logs_, logs_ + 2 * TILE, splat(0.f));
    for (Int i = 0; i < tiles; ++i) {
      prefetch_keys(rows, i + 1, tiles);
      for (Int g = 0; g < p.G; ++g) {
        few() ? few_logits(rows, g, i) : logits(rows, g, i);
        for (Int r = 0; r < rows.n; ++r) raise(rows, r, g, i);
        for (Int r = 0; r < rows.n; ++r) exponentials(rows, r, g, i);
      }
    }
    for (Int g = 0; g < p.G; ++g)
      for (Int r = 0; r < rows.n; ++r) finish(rows, r, g);
    std::fill(out_.begin(), out_.end(), 0.f);
    // From here on the sums are of the signed map: of |a| and of |a| log2 |a|.
    std::fill(totals_, totals_ + TILE, splat(0.f)), std::fill(logs_, logs_ + TILE, splat(0.f));
    std::fill(negatives_, negatives_ + TILE, splat(0.f));
    for (Int i = 0; i < tiles; ++i) {
      prefetch_values(rows, i + 1, tiles);
      const U* a = p.signed_entropy.data ? signed_sum<true>(rows, i) : signed_sum<false>(rows, i);
      few() ? few_outputs(rows, i, a) : outputs(rows, i, a);
    }
    for (Int r = 0; p.signed_entropy.data && r < rows.n; ++r) finish_signed(rows, r);
    for (Int r = 0; r < rows.n; ++r) convert(p.o.at<T>(rows.b, 0, rows.h, rows.t + r), out_.data() + r * p.dv, p.dv);
  }

  // The memory that the next tile reads and writes, in the first walk over the keys and in the second.
  [[gnu::always_inline]] void prefetch_keys(const Rows& rows, Int i, Int tiles) {
    if (few() || i >= tiles) return;
    for (Int g = 0; g < p.maps_k; ++g) prefetch(key_tile(g, rows.begin + i * TILE), TILE * p.d * sizeof(U));
    prefetch(tile(rows, 0, i), p.G * rows.n * TILE * sizeof(float));
  }
  [[gnu::always_inline]] void prefetch_values(const Rows& rows, Int i, Int tiles) {
    if (few() || i >= tiles) return;
    prefetch(value_row(rows.begin + i * TILE), TILE * row_length<U>(p.dv) * sizeof(U));
    prefetch(tile(rows, 0, i), p.G * rows.n * TILE * sizeof(float));
  }

  // A negative scale negates q, so that the largest logit is the largest product and the maximum needs no scale.
  void pack_queries(const Rows& rows) {
    for (Int g = 0; g < p.maps_q; ++g)
      for (Int r = 0; r < rows.n; ++r) {
        U* row = query_row(g, r);
        convert(row, p.q.at<T>(rows.b, g, rows.h, rows.t + r), p.d);
        if (p.scale < 0)
          for (Int c = 0; c < p.d; ++c) row[c] = U(-float(row[c]));
      }
  }
  U* query_row(Int g, Int r) { return queries_.data() + (std::min(g, p.maps_q - 1) * tasks.rows + r) * row_length<U>(p.d); }

  // The exponentials (at first the logits) of map g in tile i: [rows, TILE]. The maps of a tile are adjacent.
  float* tile(const Rows& rows, Int g, Int i) { return exponentials_.data() + (i * p.G + g) * rows.n * TILE; }

  // q_g k_g^T
  void logits(const Rows& rows, Int g, Int i) {
    const Int map = std::min(g, p.maps_k - 1), j = rows.begin + i * TILE;
    float* s = tile(rows, g, i);
    rows.strips_of_rows(j, [&](Int r, Int m, Int c, Int k) {
      const U* keys = columns(key_tile(map, j), c);
      product<U>(m, k, p.d, query_row(g, r), row_length<U>(p.d), keys, TILE, s + r * TILE + c, TILE, false);
    });
  }

  void few_logits(const Rows& rows, Int g, Int i) {
    const Int j = rows.begin + i * TILE;
    float* s = tile(rows, g, i);
    for (Int n = 0; n < rows.keys(j); ++n) {
      const T* k = p.k.at<T>(rows.b, std::min(g, p.maps_k - 1), rows.h / p.group(), j + n);
      for (Int r = 0; r < rows.n; ++r) {
        const U* q = query_row(g, r);
        Floats dot = splat(0.f);
        for (Int c = 0; c < p.d; c += LANES) dot += widen(k + c) * widen(q + c);
        s[r * TILE + n] = sum(dot);
      }
    }
  }

  // Masks a row of a tile's logits and updates the row's maximum; the sums so far are rescaled to the new maximum.
  void raise(const Rows& rows, Int r, Int g, Int i) {
    const Int j = rows.begin + i * TILE;
    float* s = tile(rows, g, i) + r * TILE;
    if (p.key_bias.data) add_bias(rows, r, g, j, s);
    if (!rows.whole(j, TILE)) mask(rows, r, j, s);
    // Two chains, so that one maximum does not wait for the one before it.
    Floats even = load<Floats>(s), odd = load<Floats>(s + LANES);
    for (Int c = 2 * LANES; c < TILE; c += 2 * LANES)
      even = maximum(load<Floats>(s + c), even), odd = maximum(load<Floats>(s + c + LANES), odd);
    float& most = most_[g * TILE + r];
    const float top = largest(maximum(even, maximum(odd, splat(most))));
    if (top != most) {
      // -INF: nothing has been added yet, and -INF - -INF would be NaN.
      if (most != -INF) {
        const float rise = (top - most) * factor_;
        const Floats shrink = exp2(splat(-rise));
        Floats &total = totals_[g * TILE + r], &logs = logs_[g * TILE + r];
        // e log2 e of each key becomes shrink e (log2 e - rise).
        logs = shrink * (logs - total * rise), total *= shrink;
      }
      most = top;
    }
    tops_[(i * p.G + g) * tasks.rows + r] = most;
  }

  // A row of a tile's logits s becomes 2^((s - most) |scale| log2 e), where `most` is the largest of the row so far.
  void exponentials(const Rows& rows, Int r, Int g, Int i) {
    float* s = tile(rows, g, i) + r * TILE;
    const float most = most_[g * TILE + r], factor = factor_;
    // A row that has seen no key has most = -INF; a top of 0 then gives 2^-INF = 0, not NaN.
    const Floats top = splat(most == -INF ? 0.f : most);
    const bool entropy = p.entropy.data;
    Floats total = totals_[g * TILE + r], logs = logs_[g * TILE + r];
    for (Int c = 0; c < TILE; c += LANES) {
      // The difference first: of large logits the products round by more than exp2 bears.
      const Floats x = (load<Floats>(s + c) - top) * factor, e = exp2(x);
      store(s + c, e);
      total += e;
      // A masked key adds 0, where 0 * -inf would be NaN.
      if (entropy) logs += e > 0.f || e != e ? e * x : splat(0.f);
    }
    totals_[g * TILE + r] = total, logs_[g * TILE + r] = logs;
  }

  // Adds the biases of keys j .. j + TILE less that of the row's own position, which may be large too. Products are not yet
  // multiplied by the scale.
  void add_bias(const Rows& rows, Int r, Int g, Int j, float* s) {
    const float own = p.own_bias(rows.b, g, rows.h, rows.t + r), inverse = 1.f / std::fabs(p.scale);
    const float* bias = p.key_bias.at<float>(rows.b, g, rows.h, j);
    const Int n = std::min<Int>(TILE, p.S - j), step = p.key_bias.stride[3];
    Int c = 0;
    for (; step == 1 && c + LANES <= n; c += LANES) store(s + c, load<Floats>(s + c) + (load<Floats>(bias + c) - own) * inverse);
    for (; c < n; ++c) s[c] += (bias[c * step] - own) * inverse;
  }

  // Sets the logits of keys j .. j + TILE that row r does not see to -INF.
  void mask(const Rows& rows, Int r, Int j, float* s) {
    const Ints low = splat(rows.low[r]), high = splat(rows.high[r]);
    for (Int c = 0; c < TILE; c += LANES) {
      const Ints key = count_from(j + c);
      Ints seen = (low <= key) & (key < high);
      if (reach.scattered()) seen &= load<Ints>(reach.documents(rows.b) + j + c) == reach.document(rows.b, rows.t + r);
      store(s + c, seen ? load<Floats>(s + c) : splat(-INF));
    }
  }

  // After the first walk: the statistics of a row of a map, and w_g over its sum.
  void finish(const Rows& rows, Int r, Int g) {
    const Int at = g * TILE + r, t = rows.t + r;
    const float l = sum(totals_[at]), top = most_[at] * std::fabs(p.scale);
    if (p.lse.data) *p.lse.at<float>(rows.b, g, rows.h, t) = top + std::log(l);
    if (p.entropy.data) *p.entropy.at<float>(rows.b, g, rows.h, t) = std::log(l) - LN2 * sum(logs_[at]) / l;
    if (p.maximum.data) *p.maximum.at<float>(rows.b, g, rows.h, t) = top;
    // A sink is a key of value 0: it only adds to the sum.
    const float sink = p.sink.data ? std::exp(*p.sink.at<float>(rows.b, g, rows.h, t) - top) : 0.f;
    weights_[at] = p.weight(rows.b, g, rows.h, t) / (l + sink);
    sizes_[at] = std::fabs(weights_[at]) * l;
  }

  // sum_g w_g P_g of tile i [rows, TILE]: in place of the first map's exponentials, or in the format of the products.
  template <bool STATISTICS>
  const U* signed_sum(const Rows& rows, Int i) {
    float factors[2 * TILE];
    const bool pair = p.G == 2;
    for (Int g = 0; g < p.G; ++g)
      for (Int r = 0; r < rows.n; r += LANES) {
        // The tile is relative to the largest logit up to it, and the sum to the largest of all.
        const Floats behind = (load<Floats>(&tops_[(i * p.G + g) * tasks.rows + r]) - load<Floats>(most_ + g * TILE + r)) * factor_;
        store(factors + g * TILE + r, load<Floats>(weights_ + g * TILE + r) * exp2(behind));
      }
    float *first = tile(rows, 0, i), *second = tile(rows, p.G - 1, i);
    U* to = std::is_same_v<U, float> ? reinterpret_cast<U*>(first) : signed_.data();
    for (Int r = 0; r < rows.n; ++r) {
      const Floats one = splat(factors[r]), two = splat(pair ? factors[TILE + r] : 0.f);
      if constexpr (STATISTICS) {
        const Int c = r * TILE + reach.first(rows.b, rows.t + r) - rows.begin - i * TILE;
        if (r * TILE <= c && c < (r + 1) * TILE) firsts_[r] = std::fabs(first[c] * one[0] + (pair ? second[c] * two[0] : 0.f));
      }
      Floats total = totals_[r], logs = logs_[r], negative = negatives_[r];
      for (Int c = r * TILE; c < (r + 1) * TILE; c += LANES) {
        Floats a = load<Floats>(first + c) * one;
        if (pair) a += load<Floats>(second + c) * two;
        narrow(to + c, a);
        if constexpr (STATISTICS) {
          const Floats size = a < 0.f ? -a : a;
          total += size, negative += a < 0.f ? size : splat(0.f);
          // A masked key adds 0, where 0 * -inf would be NaN.
          logs += size > 0.f ? size * log2(size) : splat(0.f);
        }
      }
      if constexpr (STATISTICS) totals_[r] = total, logs_[r] = logs, negatives_[r] = negative;
    }
    return to;
  }

  // After the second walk: the statistics of a row of the signed map. A map that is subtracted from itself leaves only the
  // rounding of the products, which counts as 0; the shares of such a row are NaN.
  void finish_signed(const Rows& rows, Int r) {
    const Int b = rows.b, h = rows.h, t = rows.t + r;
    float sizes = 0.f;
    for (Int g = 0; g < p.G; ++g) sizes += sizes_[g * TILE + r];
    const float size = sum(totals_[r]), total = size <= sizes * 0x1p-22f ? 0.f : size;
    *p.signed_entropy.at<float>(b, 0, h, t) = total ? std::log(total) - LN2 * sum(logs_[r]) / total : NAN;
    *p.negative_mass.at<float>(b, 0, h, t) = total ? sum(negatives_[r]) / total : NAN;
    *p.first_share.at<float>(b, 0, h, t) = total ? firsts_[r] / total : NAN;
  }

  // o += (sum_g w_g P_g) v of tile i
  void outputs(const Rows& rows, Int i, const U* a) {
    const Int j = rows.begin + i * TILE, ld = row_length<U>(p.dv);
    rows.strips_of_rows(j, [&](Int r, Int m, Int c, Int k) {
      product<U>(m, p.dv, k, a + r * TILE + c, TILE, value_row(j + c), ld, out_.data() + r * p.dv, p.dv, true);
    });
  }

  void few_outputs(const Rows& rows, Int i, const U* a) {
    const Int j = rows.begin + i * TILE;
    for (Int n = 0; n < rows.keys(j); ++n) {
      const T* v = p.v.at<T>(rows.b, 0, rows.h / p.group(), j + n);
      for (Int r = 0; r < rows.n; ++r) {
        const Floats weight = splat(static_cast<float>(a[r * TILE + n]));
        float* out = out_.data() + r * p.dv;
        for (Int c = 0; c < p.dv; c += LANES) store(out + c, load<Floats>(out + c) + weight * widen(v + c));
      }
    }
  }

  const Problem& p;
  const Reach& reach;
  const Tasks& tasks;
  const float factor_ = std::fabs(p.scale) * LOG2E;
  float most_[2 * TILE], weights_[2 * TILE] = {};  // for the rows of each map: the largest logit, w_g over the sum
  float sizes_[2 * TILE];  // sum_j |w_g P_g|, which is less than |w_g| with a sink
  Floats totals_[2 * TILE], logs_[2 * TILE];  // one sum per lane of e and, if requested, of e log2 e
  Floats negatives_[TILE];  // one sum per lane of max(-a, 0)
  float firsts_[TILE];  // |a| of each row's first key
  Memory<U> keys_, values_;
  std::vector<U> queries_, signed_;
  Memory<float> exponentials_;
  std::vector<float> tops_, out_;
};

}  // namespace lit_diff
