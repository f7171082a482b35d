/* The C interface of docs/benchmark_peers.md for W ranks that are threads of one process. */
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#define W 2
typedef unsigned long long u64;

static pthread_barrier_t meeting;
__attribute__((constructor)) static void start(void) { pthread_barrier_init(&meeting, 0, W); }
static void meet(void) { pthread_barrier_wait(&meeting); }

static float wide(uint16_t h) { uint32_t b = (uint32_t)h << 16; float f; memcpy(&f, &b, 4); return f; }
static uint16_t narrow(float f) {
  uint32_t b; memcpy(&b, &f, 4);
  return (uint16_t)((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}
static float added(const uint16_t* const* parts, u64 i) {
  float sum = 0;
  for (int q = 0; q < W; ++q) sum += wide(parts[q][i]);
  return sum;
}

int sgl_push(int two, const void* in, void* out, u64 nbytes, unsigned rank, const u64* ws, void* counter, unsigned slot, unsigned blocks, void* stream) {
  u64 need = two ? 32 * ((nbytes / 16 + W - 1) / W) : nbytes;
  if (need > slot || blocks != 4 || stream) return -1;
  unsigned phase = ((int*)counter)[0]++ & 1;
  for (int q = 0; q < W; ++q) memcpy((char*)ws[q] + (phase * W + rank) * (u64)slot, in, nbytes);
  meet();
  const uint16_t* parts[W];
  for (int q = 0; q < W; ++q) parts[q] = (uint16_t*)((char*)ws[rank] + (phase * W + q) * (u64)slot);
  for (u64 i = 0; i < nbytes / 2; ++i) ((uint16_t*)out)[i] = narrow(added(parts, i));
  return 0;
}

int sgl_pull(int two, const void* in, void* out, u64 nbytes, unsigned rank, const u64* ws, const u64* sems, const void* table, unsigned blocks, void* stream) {
  const uint16_t* const* parts = table;
  if (parts[rank] != in || blocks != 64 || stream || !ws[rank] || (out == in) != two) return -1;
  ((unsigned*)sems[rank])[0]++;
  uint16_t* sums = malloc(nbytes);
  meet();
  for (u64 i = 0; i < nbytes / 2; ++i) sums[i] = narrow(added(parts, i));
  meet();
  memcpy(out, sums, nbytes);
  free(sums);
  return 0;
}

int vllm_meta_size(void) { return 256; }
int vllm_allreduce(int stages, const void* rank_data, const u64* signals, void* out, int rank, long long numel, int blocks, void* stream) {
  if (stages != 1 || blocks != 36 || stream || ((u64*)rank_data)[W]) return -1;
  ((unsigned*)signals[rank])[63]++;
  meet();
  for (long long i = 0; i < numel; ++i) ((uint16_t*)out)[i] = narrow(added(rank_data, i));
  meet();
  return 0;
}

int fi_allreduce(int norm, const void* in, void* out, const void* res_in, void* res_out, void* norm_out, const void* gamma, float eps, int rank, int tokens, int hidden, void* workspace, int pdl, int oneshot, int at_end, int fp32_acc, void* stream) {
  char** table = workspace; /* buffers, flags, Lamport buffers of each rank; then the state */
  int* state = (int*)table[3 * W];
  u64 n = (u64)tokens * hidden, area = state[3];
  if (pdl != 1 || fp32_acc != 1 || stream || (!oneshot && (tokens <= W || !at_end)) || n * 2 * W > area) return -1;
  char** base = oneshot ? table + 2 * W : table;
  u64 start = oneshot ? (state[2] % 3) * area : 0;
  uint16_t* parts[W];
  for (int q = 0; q < W; ++q) {
    parts[q] = (uint16_t*)(base[rank] + start + q * n * 2);
    if (oneshot && parts[q][n - 1] != 0x8000) return -2; /* a Lamport kernel would not wait */
  }
  meet();
  for (int q = 0; q < W; ++q) memcpy(base[q] + start + rank * n * 2, in, n * 2);
  ((int*)table[W + rank])[0]++;
  meet();
  for (int t = 0; t < tokens; ++t) {
    double square = 0;
    for (int j = 0; j < hidden; ++j) {
      u64 i = (u64)t * hidden + j;
      float sum = added((const uint16_t* const*)parts, i);
      if (!norm) { ((uint16_t*)out)[i] = narrow(sum); continue; }
      sum += wide(((const uint16_t*)res_in)[i]);
      ((uint16_t*)res_out)[i] = narrow(sum);
      square += (double)sum * sum;
    }
    for (int j = 0; norm && j < hidden; ++j) {
      u64 i = (u64)t * hidden + j;
      float total = wide(((uint16_t*)res_out)[i]);
      ((uint16_t*)norm_out)[i] = narrow(total / sqrt(square / hidden + eps) * wide(((const uint16_t*)gamma)[j]));
    }
  }
  if (oneshot) for (int q = 0; q < W; ++q) for (u64 i = 0; i < n; ++i) parts[q][i] = 0x8000;
  state[2]++;
  meet();
  return 0;
}
