// Packed documents: each is a request of its own, whose tensors begin at the document's first token. A task is a head
// of a document, computed by one thread. A document that would keep one thread busy while the others wait is computed
// by all of them, before the tasks.
#pragma once
#include <vector>

#include "head.h"

namespace gka {

constexpr double LONG = 1.5;  // a head of a document, measured in what a thread has to do on average

struct Documents {
  const GkaRequest& q;
  int32_t phase;
  int64_t number_size, row_size;                        // bytes of a feature, and of row_state for one query
  int64_t (*scratch_size)(const GkaRequest*, int32_t);  // of one document
  std::vector<int64_t> order;                           // the documents that have tokens, the longest first
  size_t shared = 0;                                    // so many of them are computed by all threads

  Documents(const GkaRequest& q, int32_t phase, int64_t number_size, int64_t row_size,
            int64_t (*scratch_size)(const GkaRequest*, int32_t))
      : q(q), phase(phase), number_size(number_size), row_size(row_size), scratch_size(scratch_size) {
    double all = 0.0;
    for (int64_t document = 0; document < q.batch; document++)
      if (length(document) > 0) order.push_back(document), all += cost(document) * double(q.num_heads);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return length(a) > length(b); });
    while (q.threads > 1 && shared < order.size() && cost(order[shared]) * q.threads > LONG * all) shared++;
  }
  int64_t length(int64_t document) const { return q.cu_seqlens[document + 1] - q.cu_seqlens[document]; }
  double cost(int64_t document) const {
    const int64_t tokens = length(document), unlimited = 2 * tokens;
    const int64_t before = q.before < 0 ? unlimited : q.before, after = q.after < 0 ? unlimited : q.after;
    return double(tokens) * double(std::min(tokens, before + after + 1));
  }
  int64_t tasks() const { return (order.size() - shared) * q.num_heads; }

  // Some heads of a document as a request. Its dlog_sigma is the piece of `sums`, (documents, H), that it has to fill.
  GkaRequest part(int64_t document, int64_t head, int64_t heads, int32_t threads, float* sums) const {
    const int64_t begin = q.cu_seqlens[document], tokens = length(document);
    GkaRequest part = q;
    for (GkaTensor* t : {&part.x, &part.keys, &part.values, &part.y, &part.grad_y, &part.dx, &part.dkeys, &part.dvalues,
                         &part.residual})
      if (t->data) t->data = static_cast<char*>(t->data) + (begin * t->token + head * t->head) * number_size;
    part.row_state = static_cast<char*>(q.row_state) + (begin * q.num_heads + head * tokens) * row_size;
    part.log_sigma += head;
    part.dlog_sigma = sums ? sums + document * q.num_heads + head : nullptr;
    part.cu_seqlens = nullptr;
    part.batch = 1, part.num_queries = part.num_keys = tokens, part.num_heads = heads, part.threads = threads;
    return part;
  }
  GkaRequest shared_part(size_t i, float* sums) const { return part(order[i], 0, q.num_heads, q.threads, sums); }
  GkaRequest task(int64_t task, float* sums) const {
    return part(order[shared + task / q.num_heads], task % q.num_heads, 1, 1, sums);
  }
  int64_t sums() const { return round_up(q.batch * q.num_heads, 16); }

  // Numbers of scratch: `sums`, then a slot for each thread, or more for a document that is shared.
  int64_t scratch() const {
    int64_t most = q.threads * slot_size();
    for (size_t i = 0; i < shared; i++) most = std::max(most, scratch_of(shared_part(i, nullptr)));
    return sums() + most;
  }
  int64_t slot_size() const {
    int64_t size = 0;
    for (int64_t i = 0; i < tasks(); i += q.num_heads) size = std::max(size, scratch_of(task(i, nullptr)));
    return round_up(size, 16);
  }
  int64_t scratch_of(const GkaRequest& part) const { return scratch_size(&part, phase); }
};

// Call compute(part, scratch), which returns a number, for all documents, and add up dlog_sigma. Returns the largest.
template <typename Compute>
float each_document(const Documents& documents, float* scratch, Compute compute) {
  const GkaRequest& q = documents.q;
  const int64_t tasks = documents.tasks(), slot_size = documents.slot_size();
  float *sums = scratch, *slots = scratch + documents.sums(), largest = 0.0f;
  std::fill(sums, slots, 0.0f);
  for (size_t i = 0; i < documents.shared; i++)
    largest = std::max(largest, compute(documents.shared_part(i, sums), slots));
#pragma omp parallel for schedule(dynamic, 1) reduction(max : largest)                                                 \
    num_threads(std::max<int64_t>(1, std::min<int64_t>(q.threads, tasks)))
  for (int64_t task = 0; task < tasks; task++)
    largest = std::max(largest, compute(documents.task(task, sums), slots + omp_get_thread_num() * slot_size));
  for (int64_t head = 0; q.dlog_sigma && head < q.num_heads; head++) {
    double sum = 0.0;
    for (int64_t document = 0; document < q.batch; document++) sum += double(sums[document * q.num_heads + head]);
    q.dlog_sigma[head] = float(sum);
  }
  return largest;
}

inline Documents documents_float32(const GkaRequest& q, int32_t phase) {
  return {q, phase, sizeof(float), sizeof(GkaRow), gka_scratch_float32};
}
inline Documents documents_bfloat16(const GkaRequest& q, int32_t phase) {
  return {q, phase, sizeof(uint16_t), sizeof(float), gka_scratch_bfloat16};
}

}  // namespace gka
