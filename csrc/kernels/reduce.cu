#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/num_sms.hpp"
#include "kernels/reduce.hpp"

namespace flux {
namespace {

template <class T>
struct Sum {
  using Type = float;
};
template <>
struct Sum<double> {
  using Type = double;
};

// 16 bytes, loaded and stored at once.
template <class T>
struct alignas(16) Vector {
  static constexpr int kSize = 16 / sizeof(T);
  T at[kSize];
};

// The sum of element i, and of nothing else: the end of an array that is no whole vector.
template <class T>
__device__ void reduce_one(ReduceArgs const& args, int64_t i) {
  using S = typename Sum<T>::Type;
  S sum = static_cast<S>(static_cast<T const*>(args.part[0])[i]);
  for (int r = 1; r < args.world; ++r) sum += static_cast<S>(static_cast<T const*>(args.part[r])[i]);
  if (args.bias != nullptr) sum += static_cast<S>(static_cast<T const*>(args.bias)[i % args.n]);
  static_cast<T*>(args.y)[i] = static_cast<T>(sum);
}

template <class T>
__global__ void reduce_kernel(ReduceArgs const args) {
  using S = typename Sum<T>::Type;
  constexpr int kSize = Vector<T>::kSize;
  int64_t const elements = args.rows * args.n;
  int64_t const vectors = elements / kSize;
  int64_t const stride = int64_t{gridDim.x} * blockDim.x;
  int64_t const first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (int64_t v = first; v < vectors; v += stride) {
    S sum[kSize];
    Vector<T> const part0 = static_cast<Vector<T> const*>(args.part[0])[v];
#pragma unroll
    for (int j = 0; j < kSize; ++j) sum[j] = static_cast<S>(part0.at[j]);
#pragma unroll 4
    for (int r = 1; r < args.world; ++r) {
      Vector<T> const part = static_cast<Vector<T> const*>(args.part[r])[v];
#pragma unroll
      for (int j = 0; j < kSize; ++j) sum[j] += static_cast<S>(part.at[j]);
    }
    if (args.bias != nullptr) {
      int64_t col = v * kSize % args.n;
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        sum[j] += static_cast<S>(static_cast<T const*>(args.bias)[col]);
        col = col + 1 == args.n ? 0 : col + 1;
      }
    }
    Vector<T> result;
#pragma unroll
    for (int j = 0; j < kSize; ++j) result.at[j] = static_cast<T>(sum[j]);
    static_cast<Vector<T>*>(args.y)[v] = result;
  }
  int64_t const tail = vectors * kSize + first;
  if (tail < elements) reduce_one<T>(args, tail);
}

template <class T>
cudaError_t launch(ReduceArgs const& args, cudaStream_t stream) {
  constexpr int kThreads = 256;
  constexpr int64_t kMaxBlocks = 8 * kNumSms;
  int64_t const vectors = ceil_div(args.rows * args.n, Vector<T>::kSize);
  int64_t const blocks = ceil_div(vectors, kThreads);
  reduce_kernel<T><<<static_cast<unsigned>(blocks < kMaxBlocks ? blocks : kMaxBlocks), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

cudaError_t reduce_partials(ReduceArgs const& args, DataType dtype, cudaStream_t stream) {
  switch (dtype) {
    case DataType::kFloat32:
      return launch<float>(args, stream);
    case DataType::kFloat64:
      return launch<double>(args, stream);
    case DataType::kBFloat16:
      return launch<__nv_bfloat16>(args, stream);
    case DataType::kFloat16:
      return launch<__half>(args, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace flux
