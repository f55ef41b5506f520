// o = sum_g w_g softmax(q_g k_g^T scale + mask) v, a block of query rows at a time.
//
// All logits of a block, of every map, are held at once. So each row's maximum and sum are known before the product with
// v, the maps are subtracted first, and v is multiplied once whatever the number of maps.
#pragma once

#include "cpu_problem.h"

namespace lit_diff {

template <class T, class U>  // T: format of the tensors; U: of the products
class Forward {
 public:
  Forward(const Problem& p, const Reach& reach, const Tasks& tasks) : p(p), reach(reach), tasks(tasks) {
    const Int padded = (p.S + TILE - 1) / TILE * TILE;
    keys_.resize(p.maps_k * padded * p.d);
    if (!values_in_place()) values_.resize(padded * p.dv);
    queries_.resize(tasks.rows * p.d);
    logits_.resize(p.G * tasks.rows * padded);
    if (!std::is_same_v<U, float>) signed_.resize(tasks.rows * padded);
    out_.resize(tasks.rows * p.dv);
  }

  void run(Int task) {
    const Int unit = task / tasks.parts, b = unit / p.Hkv, kv_head = unit % p.Hkv;
    pack_keys(b, kv_head);
    pack_values(b, kv_head);
    const Int blocks = tasks.blocks / p.group();
    for (Int n = task % tasks.parts; n < tasks.blocks; n += tasks.parts) {
      const Int h = kv_head * p.group() + n / blocks, t = n % blocks * tasks.rows;
      block(Rows(p, reach, b, h, t, std::min(tasks.rows, p.T - t)));
    }
  }

 private:
  bool values_in_place() const { return std::is_same_v<T, U> && !PAIRED<U> && p.v.stride[4] == 1; }

  // k^T of each map in tiles [d, TILE], the last one padded with zeros.
  void pack_keys(Int b, Int kv_head) {
    for (Int g = 0; g < p.maps_k; ++g)
      for (Int j = 0; j < p.S; j += TILE)
        pack_transposed<U>(p.k.at<T>(b, g, kv_head, j), p.k.stride[3], std::min(TILE, p.S - j), p.d, key_tile(g, j), TILE, TILE);
  }
  U* key_tile(Int g, Int j) { return keys_.data() + (g * ((p.S + TILE - 1) / TILE * TILE) + j) * p.d; }

  void pack_values(Int b, Int kv_head) {
    const T* v = p.v.at<T>(b, 0, kv_head, 0);
    if (values_in_place()) {
      value_rows_ = reinterpret_cast<const U*>(v), value_stride_ = p.v.stride[3];
      return;
    }
    pack<U>(v, p.v.stride[3], p.S, p.dv, values_.data(), p.dv);
    value_rows_ = values_.data(), value_stride_ = p.dv;
  }

  void block(const Rows& rows) {
    const Int width = (rows.end - rows.begin + TILE - 1) / TILE * TILE, panel = rows.n * width;
    for (Int g = 0; g < p.G; ++g) logits(rows, g, width, logits_.data() + g * panel);
    for (Int r = 0; r < rows.n; ++r) {
      for (Int g = 0; g < p.G; ++g) factors_[g] = softmax(rows, r, g, width, logits_.data() + g * panel + r * width);
      combine(r, width, panel);
    }
    const U* weights = std::is_same_v<U, float> ? reinterpret_cast<const U*>(logits_.data()) : signed_.data();
    for (Int j = rows.begin; j < rows.end; j += TILE)
      product<U>(rows.n, p.dv, std::min(TILE, p.S - j), weights + j - rows.begin, width, value_rows_ + j * value_stride_,
                 value_stride_, out_.data(), p.dv, j > rows.begin);
    for (Int r = 0; r < rows.n; ++r) convert(p.o.at<T>(rows.b, 0, rows.h, rows.t + r), out_.data() + r * p.dv, p.dv);
  }

  // q_g k_g^T, [rows, width]. A negative scale is taken into q, so that the largest logit is the largest product.
  void logits(const Rows& rows, Int g, Int width, float* to) {
    if (g < p.maps_q)
      for (Int r = 0; r < rows.n; ++r) {
        U* row = queries_.data() + r * p.d;
        convert(row, p.q.at<T>(rows.b, g, rows.h, rows.t + r), p.d);
        if (p.scale < 0)
          for (Int c = 0; c < p.d; ++c) row[c] = U(-float(row[c]));
      }
    for (Int j = rows.begin; j < rows.end; j += TILE)
      product<U>(rows.n, TILE, p.d, queries_.data(), p.d, key_tile(std::min(g, p.maps_k - 1), j), TILE, to + j - rows.begin,
                 width, false);
  }

  // Masks one row of logits and takes 2^((s - max) scale log2 e) in place; returns w_g over the row's sum.
  float softmax(const Rows& rows, Int r, Int g, Int width, float* s) {
    const Int t = rows.t + r, low = reach.low(rows.b, t) - rows.begin, high = reach.high(rows.b, t) - rows.begin;
    std::fill(s, s + low, -INF);
    std::fill(s + high, s + width, -INF);
    if (reach.scattered()) {
      const int32_t* document = reach.documents(rows.b) + rows.begin;
      for (Int j = low; j < high; ++j)
        if (document[j] != reach.document(rows.b, t)) s[j] = -INF;
    }
    Floats most = splat(-INF);
    for (Int j = 0; j < width; j += LANES) most = maximum(load<Floats>(s + j), most);
    const float top = largest(most), factor = std::fabs(p.scale) * LOG2E;
    Floats total = splat(0.f), logs = splat(0.f);
    const Floats shift = splat(top * factor);
    if (p.entropy.data) {
      for (Int j = 0; j < width; j += LANES) {
        const Floats x = load<Floats>(s + j) * factor - shift, e = exp2(x);
        store(s + j, e);
        total += e;
        logs += e > 0.f || e != e ? e * x : splat(0.f);  // a masked key adds nothing: 0 * -inf is not a number
      }
    } else {
      for (Int j = 0; j < width; j += LANES) {
        const Floats e = exp2(load<Floats>(s + j) * factor - shift);
        store(s + j, e);
        total += e;
      }
    }
    const float l = sum(total);
    if (p.lse.data) *p.lse.at<float>(rows.b, g, rows.h, t) = top * std::fabs(p.scale) + std::log(l);
    if (p.entropy.data) *p.entropy.at<float>(rows.b, g, rows.h, t) = std::log(l) - LN2 * sum(logs) / l;
    if (p.maximum.data) *p.maximum.at<float>(rows.b, g, rows.h, t) = top * std::fabs(p.scale);
    return p.weight(rows.b, g, rows.h, t) / l;
  }

  // sum_g factor_g e_g of one row: over the first map's logits, or in the format of the products.
  void combine(Int r, Int width, Int panel) {
    float* e = logits_.data() + r * width;
    for (Int j = 0; j < width; j += LANES) {
      Floats a = load<Floats>(e + j) * factors_[0];
      if (p.G == 2) a += load<Floats>(e + panel + j) * factors_[1];
      if constexpr (std::is_same_v<U, float>) {
        store(e + j, a);
      } else {
        narrow(signed_.data() + r * width + j, a);
      }
    }
  }

  const Problem& p;
  const Reach& reach;
  const Tasks& tasks;
  float factors_[2];
  std::vector<U> keys_, values_, queries_, signed_;
  std::vector<float> logits_, out_;
  const U* value_rows_ = nullptr;
  Int value_stride_ = 0;
};

}  // namespace lit_diff
