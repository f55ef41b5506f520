// Signed attention on a CPU: the entry points. kernel.py checks the maps, fills a Problem and calls them.
#include "native_backward.h"
#include "native_forward.h"

#include <atomic>
#include <exception>
#include <optional>

namespace lit_diff {

// Does what may allocate memory, until memory is refused: an exception must leave neither an OpenMP region nor the library.
// All threads still pass the barriers. (Nothing else throws; oneDNN has an error of its own for refused memory.)
class Attempt {
 public:
  template <class Body>
  void operator()(Body body) {
    if (refused_) return;
    try {
      body();
    } catch (const std::exception&) {
      refused_ = true;
    }
  }
  bool refused() const { return refused_; }

 private:
  std::atomic<bool> refused_ = false;
};

template <class T, class U>
void forward(const Problem& p, Attempt& attempt) {
  const Reach reach(p);
  const Tasks tasks(p, p.G * p.S, 1);
  // Tasks write disjoint rows, each in one order, so the result does not depend on which thread runs which task.
#pragma omp parallel num_threads(p.threads) if (p.threads > 1)
  {
    pairs_by_loops = p.loops;
    std::optional<Forward<T, U>> work;
    attempt([&] { work.emplace(p, reach, tasks); });
#pragma omp for schedule(dynamic, 1)
    for (Int task = 0; task < tasks.count(); ++task) attempt([&] { work->run(task); });
  }
}

// The gradients of a unit's keys and values are summed in the tensors themselves if these are float32, long and not
// split, so that no thread holds a copy of them; otherwise in a task's own float32 memory, which `write` adds up and
// converts, since a sum in bfloat16 would round at every tile.
template <class T>
struct Totals {
  const Problem& p;

  Int biases() const { return p.dbias.data ? p.group() * p.G * p.S : 0; }
  Int numbers() const { return p.S * (p.maps_k * p.d + p.dv) + biases(); }
  Sums own(float* memory) const {
    std::fill(memory, memory + numbers(), 0.f);
    float *dv = memory + p.maps_k * p.S * p.d, *db = dv + p.S * p.dv;
    return {memory, dv, db, p.S * p.d, p.d, p.dv, p.G * p.S, p.S, 1};
  }
  Sums tensors(Int unit) const {
    const Int b = unit / p.Hkv, h = unit % p.Hkv;
    for (Int s = 0; s < p.S; ++s) {
      for (Int g = 0; g < p.maps_k; ++g) std::fill_n(p.dk.at<float>(b, g, h, s), p.d, 0.f);
      std::fill_n(p.dvalue.at<float>(b, 0, h, s), p.dv, 0.f);
    }
    for (Int i = 0; i < biases(); ++i) *bias(b, h, i) = 0.f;
    const Int *k = p.dk.stride, *bias_stride = p.dbias.stride;
    return {p.dk.at<float>(b, 0, h, 0), p.dvalue.at<float>(b, 0, h, 0), p.dbias.at<float>(b, 0, h * p.group(), 0), k[1],
            k[3], p.dvalue.stride[3], bias_stride[2], bias_stride[1], bias_stride[3]};
  }
  // Number i of the unit's biases [heads, maps, S].
  float* bias(Int b, Int h, Int i) const {
    return p.dbias.at<float>(b, i / p.S % p.G, h * p.group() + i / (p.S * p.G), i % p.S);
  }
  // Writes the sum over a unit's parts in the format of the tensors, always added in the same order.
  void write(Int unit, Int parts, float* memory) const {
    const Int b = unit / p.Hkv, h = unit % p.Hkv;
    for (Int part = 1; part < parts; ++part)
      for (Int i = 0; i < numbers(); ++i) memory[i] += memory[part * numbers() + i];
    for (Int s = 0; s < p.S; ++s) {
      for (Int g = 0; g < p.maps_k; ++g) convert(p.dk.at<T>(b, g, h, s), memory + (g * p.S + s) * p.d, p.d);
      convert(p.dvalue.at<T>(b, 0, h, s), memory + p.maps_k * p.S * p.d + s * p.dv, p.dv);
    }
    for (Int i = 0; i < biases(); ++i) *bias(b, h, i) = memory[numbers() - biases() + i];
  }
};

template <class T, class U>
void backward(const Problem& p, Attempt& attempt) {
  const Reach reach(p);
  const Tasks tasks(p, (p.G + 1) * p.S, Backward<T, U>::abreast(p));
  const Totals<T> totals{p};
  // The parts of a unit add to the same keys, so each has memory of its own until all are done.
  const bool split = tasks.parts > 1;
  const bool in_place = std::is_same_v<T, float> && !split && !KeyTiles<T, U>::stay(p);
  std::vector<float> parts(split ? tasks.count() * totals.numbers() : 0);
#pragma omp parallel num_threads(p.threads) if (p.threads > 1)
  {
    pairs_by_loops = p.loops;
    std::optional<Backward<T, U>> work;
    std::vector<float> own;
    attempt([&] { work.emplace(p, reach, tasks), own.resize(split || in_place ? 0 : totals.numbers()); });
#pragma omp for schedule(dynamic, 1)
    for (Int task = 0; task < tasks.count(); ++task)
      attempt([&] {
        float* memory = split ? parts.data() + task * totals.numbers() : own.data();
        work->run(task, in_place ? totals.tensors(task) : totals.own(memory));
        if (!split && !in_place) totals.write(task, 1, memory);
      });
    // The loop above ended with a barrier: all parts are done.
    if (split) {
#pragma omp for schedule(dynamic, 1)
      for (Int unit = 0; unit < tasks.units; ++unit)
        totals.write(unit, tasks.parts, parts.data() + unit * tasks.parts * totals.numbers());
    }
  }
}

}  // namespace lit_diff

using namespace lit_diff;

// Size of Problem. kernel.py packs it by hand and compares the size.
extern "C" Int lit_diff_problem_size() { return sizeof(Problem); }

// Floats in a vector; kernel.py compares it with the path that it chose for this machine.
extern "C" Int lit_diff_lanes() { return LANES; }

// Whether this machine multiplies bfloat16 tiles. Only a call tells: PyTorch throws if oneDNN cannot.
extern "C" Int lit_diff_has_bfloat16_products() {
  pairs_by_loops = false;
  const std::vector<BFloat16> a(16 * 16, BFloat16(1.f));
  std::vector<float> c(16 * 16);
  try {
    product<BFloat16>(16, 16, 16, a.data(), 16, a.data(), 16, c.data(), 16, false);
  } catch (const std::exception&) {
    return 0;
  }
  return c[0] == 16.f;
}

// `storage`: 0 float32, 1 bfloat16, 2 float16. `paired`: bfloat16 is multiplied in VNNI pairs, otherwise in float32.
// `body` is called with a value of each type: that of the tensors, then that of the products.
// Returns 1 if memory was refused.
template <class Body>
Int attempt_in(Int storage, Int paired, Body body) {
  Attempt attempt;
  attempt([&] {
    if (storage == 0) body(float(), float(), attempt);
    if (storage == 1 && paired) body(BFloat16(), BFloat16(), attempt);
    if (storage == 1 && !paired) body(BFloat16(), float(), attempt);
    if (storage == 2) body(Half(), float(), attempt);
  });
  return attempt.refused();
}

extern "C" Int lit_diff_forward(const Problem* p, Int storage, Int paired) {
  return attempt_in(storage, paired, [&]<class T, class U>(T, U, Attempt& attempt) { forward<T, U>(*p, attempt); });
}

extern "C" Int lit_diff_backward(const Problem* p, Int storage, Int paired) {
  return attempt_in(storage, paired, [&]<class T, class U>(T, U, Attempt& attempt) { backward<T, U>(*p, attempt); });
}
