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

/* A workspace: the number of calls, counts by sender, slots of the own tokens by receiver; then the rows. */
enum { COUNTS = 16, SLOTS = 64, ROWS = 8192 };
int moe_layout(int ranks, int tokens, int width, int top_k, u64* found) {
  u64 slots = (u64)ranks * tokens;
  found[0] = ROWS + 2 * slots * width * 2;
  found[1] = COUNTS;
  found[2] = ROWS;
  return ranks != W || SLOTS + tokens * W * 4 > ROWS;
}

static int out_of_turn(char* own, int set, int pdl, void* stream) {
  return set != (((int*)own)[0]++ & 1) || pdl != 1 || stream;
}

int moe_dispatch(const void* x, const void* ids, const void* weights, int rank, int ranks, int tokens, int width, int top_k, int experts, const u64* ws, int set, int pdl, void* stream) {
  int* slots = (int*)((char*)ws[rank] + SLOTS);
  int sent[W] = {0};
  u64 row = (u64)width * 2;
  if (out_of_turn((char*)ws[rank], set, pdl, stream) || ranks != W || !weights) return -1;
  meet();
  for (int t = tokens - 1; t >= 0; --t) { /* slots are in no order that a receiver may rely on */
    int wanted[W] = {0};
    for (int k = 0; k < top_k; ++k) wanted[((const int*)ids)[t * top_k + k] / (experts / W)] = 1;
    for (int q = 0; q < W; ++q) {
      slots[t * W + q] = wanted[q] ? sent[q]++ : -1;
      if (wanted[q]) memcpy((char*)ws[q] + ROWS + ((u64)rank * tokens + slots[t * W + q]) * row, (const char*)x + t * row, row);
    }
  }
  for (int q = 0; q < W; ++q) ((int*)((char*)ws[q] + COUNTS))[rank] = sent[q];
  meet();
  return 0;
}

int moe_combine(const void* rows, void* out, int rank, int ranks, int tokens, int width, int top_k, const u64* ws, int set, int pdl, void* stream) {
  const int* slots = (int*)((char*)ws[rank] + SLOTS);
  u64 area = (u64)ranks * tokens * width * 2, from = ROWS + (rows ? area : 0);
  if (out_of_turn((char*)ws[rank], set, pdl, stream) || ranks != W) return -1;
  if (rows) memcpy((char*)ws[rank] + from, rows, area);
  meet();
  for (int t = 0; t < tokens; ++t)
    for (int j = 0; j < width; ++j) {
      float sum = 0;
      for (int q = 0; q < W; ++q) {
        u64 slot = (u64)rank * tokens + slots[t * W + q];
        if (slots[t * W + q] >= 0) sum += wide(((const uint16_t*)((char*)ws[q] + from))[slot * width + j]);
      }
      ((uint16_t*)out)[(u64)t * width + j] = narrow(sum);
    }
  meet();
  return 0;
}
