// The task of linear_attention_rows_, included once per instruction set, after recurrent_channels.h.

namespace specdec {
namespace SPECDEC_ISA {

// Working memory: the state of a block of value channels, and the row that advances it.
struct AttentionScratch {
  float* state;   // [key_dim, kBlock]
  float* key;     // [key_dim]
  float* query;   // [key_dim]
  float* decay;   // [key_dim]: factors
  float* weight;  // [key_dim]: of the state in the value that it has for the key
  float value[kBlock];
  float out[kBlock];
  float beta;

  AttentionScratch(float* scratch, std::int64_t key_dim)
      : state(scratch),
        key(scratch + key_dim * kBlock),
        query(key + key_dim),
        decay(query + key_dim),
        weight(decay + key_dim),
        value{},
        out{},
        beta(1.0f) {}
};

// Multiplies a vector by `scale`, and if `epsilon` is not negative by the inverse of its length. Lane l of 16 adds the
// squares l, l + 16, ...; the lanes are then added in pairs.
SPECDEC_INLINE void normalise(float* vector, std::int64_t size, float epsilon, float scale) {
  if (epsilon >= 0.0f) {
    float lanes[16] = {};
    std::int64_t i = 0;
    for (; i + 16 <= size; i += 16) {
      for (int lane = 0; lane < 16; ++lane) lanes[lane] += vector[i + lane] * vector[i + lane];
    }
    for (int lane = 0; i + lane < size; ++lane) lanes[lane] += vector[i + lane] * vector[i + lane];
    for (int half = 8; half > 0; half /= 2) {
      for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    scale *= 1.0f / std::sqrt(lanes[0] + epsilon);
  }
  for (std::int64_t i = 0; i < size; ++i) vector[i] *= scale;
}

// Sums of many terms, one for each channel. kRun terms in a row are added, then the sums of these: that rounds less than one
// long sum, and the next run need not wait for the last.
class ChannelSums {
 public:
  static constexpr std::int64_t kRun = 16;

  SPECDEC_INLINE void begin_run() {
    for (int v = 0; v < kVectors; ++v) run_[v] = Vector{};
  }
  SPECDEC_INLINE void add(int v, Vector left, float right) { run_[v] = multiply_add(left, splat(right), run_[v]); }
  SPECDEC_INLINE void end_run() {
    for (int v = 0; v < kVectors; ++v) total_[v] = total_[v] + run_[v];
  }
  SPECDEC_INLINE Vector of(int v) const { return total_[v]; }

 private:
  Vector run_[kVectors], total_[kVectors] = {};
};

// Advances the state by one row, and reads it with the query. Pointers and factors are copied, because a store to the state
// might change them as far as the compiler knows.
SPECDEC_INLINE void advance(const AttentionScratch& own, std::int64_t key_dim, bool delta_rule, float* out) {
  float* const state = own.state;
  const float *const weights = own.weight, *const decays = own.decay, *const keys = own.key, *const queries = own.query;
  ChannelSums before, read;
  for (std::int64_t first = 0; delta_rule && first < key_dim; first += ChannelSums::kRun) {
    before.begin_run();
    for (std::int64_t k = first; k < std::min(key_dim, first + ChannelSums::kRun); ++k) {
      for (int v = 0; v < kVectors; ++v) before.add(v, load_vector(state + k * kBlock + v * kLanes), weights[k]);
    }
    before.end_run();
  }
  Vector change[kVectors];
  for (int v = 0; v < kVectors; ++v) change[v] = (load_vector(own.value + v * kLanes) - before.of(v)) * own.beta;
  for (std::int64_t first = 0; first < key_dim; first += ChannelSums::kRun) {
    read.begin_run();
    for (std::int64_t k = first; k < std::min(key_dim, first + ChannelSums::kRun); ++k) {
      const float decay = decays[k], key = keys[k], query = queries[k];
      for (int v = 0; v < kVectors; ++v) {
        float* place = state + k * kBlock + v * kLanes;
        const Vector next = multiply_add(splat(key), change[v], decay * load_vector(place));
        store_as(place, next);
        read.add(v, next, query);
      }
    }
    read.end_run();
  }
  for (int v = 0; v < kVectors; ++v) store_as(out + v * kLanes, read.of(v));
}

// The task of one block of a head's value channels.
template <typename Format>
class AttentionTask {
 public:
  using Storage = typename Format::Storage;

  AttentionTask(const LinearAttentionRowsArgs& args, const ChannelBlock& block, float* scratch)
      : args_(args),
        block_(block),
        rows_(sequence_rows(args.batch, block.sequence)),
        head_(block.part),
        key_head_(head_ / (args.value_heads / args.key_heads)),
        own_(scratch, args.key_dim) {}

  void run() {
    float* states =
        args_.states + (rows_.slot * args_.value_heads + head_) * args_.key_dim * args_.value_dim + block_.first;
    load_state(rows_.position > 0 ? states : nullptr, args_.key_dim, args_.value_dim, block_.width, own_.state);
    std::memset(own_.query, 0, static_cast<std::size_t>(args_.key_dim) * sizeof(float));
    for (std::int64_t i = 0;; ++i) {
      if (i == rows_.num_stored) store_state(own_.state, args_.key_dim, args_.value_dim, block_.width, states);
      if (i == rows_.count) return;
      const std::int64_t row = i < rows_.num_replayed ? -1 : rows_.first + i - rows_.num_replayed;
      float* kept = i < rows_.num_replayed || i >= rows_.num_stored ? kept_row(i) : nullptr;
      row < 0 ? load_kept(kept) : load_row(row);
      if (row >= 0 && kept) keep(kept);
      prepare();
      advance(own_, args_.key_dim, args_.delta_rule, own_.out);
      if (row >= 0) store_out(row);
    }
  }

 private:
  float* kept_row(std::int64_t i) const {
    return args_.kept + (rows_.slot * args_.num_kept + (rows_.position + i) % args_.num_kept) * args_.kept_width();
  }

  void load_kept(const float* kept) {
    copy_numbers(kept + key_head_ * args_.key_dim, own_.key, args_.key_dim);
    copy_numbers(kept + args_.kept_value() + head_ * args_.value_dim + block_.first, own_.value, block_.width);
    copy_numbers(kept + args_.kept_decay() + head_ * args_.decays(), own_.decay, args_.decays());
    if (args_.has_beta) own_.beta = kept[args_.kept_beta() + head_];
  }

  template <typename From>
  const From* at(const HeadRows<void>& rows, std::int64_t row, std::int64_t head) const {
    return as<From>(rows.data) + row * rows.stride_row + head * rows.stride_head;
  }

  void load_row(std::int64_t row) {
    load_numbers<Format>(at<Storage>(args_.key, row, key_head_), own_.key, args_.key_dim);
    load_numbers<Format>(at<Storage>(args_.query, row, key_head_), own_.query, args_.key_dim);
    normalise(own_.query, args_.key_dim, args_.l2norm_eps, args_.scale);
    load_numbers<Format>(at<Storage>(args_.value, row, head_) + block_.first, own_.value, block_.width);
    const HeadRows<float>& decays = args_.log_decay;
    copy_numbers(decays.data + row * decays.stride_row + head_ * decays.stride_head, own_.decay, args_.decays());
    const HeadRows<float>& betas = args_.beta;
    if (args_.has_beta) own_.beta = betas.data[row * betas.stride_row + head_ * betas.stride_head];
  }

  // Keeps the inputs of a draft row. What tasks share is written by the first of them.
  void keep(float* kept) const {
    const bool first_block = block_.first == 0, first_head = head_ % (args_.value_heads / args_.key_heads) == 0;
    if (first_block && first_head) copy_numbers(own_.key, kept + key_head_ * args_.key_dim, args_.key_dim);
    copy_numbers(own_.value, kept + args_.kept_value() + head_ * args_.value_dim + block_.first, block_.width);
    if (!first_block) return;
    copy_numbers(own_.decay, kept + args_.kept_decay() + head_ * args_.decays(), args_.decays());
    if (args_.has_beta) kept[args_.kept_beta() + head_] = own_.beta;
  }

  // Turns the inputs that are kept into what advances the state.
  void prepare() {
    const std::int64_t size = args_.key_dim;
    normalise(own_.key, size, args_.l2norm_eps, 1.0f);
    for (std::int64_t k = 0; k < args_.decays(); ++k) own_.decay[k] = exp_of(own_.decay[k]);
    if (!args_.decay_per_channel) std::fill(own_.decay + 1, own_.decay + size, own_.decay[0]);
    for (std::int64_t k = 0; k < size; ++k) own_.weight[k] = own_.decay[k] * own_.key[k];
  }

  void store_out(std::int64_t row) {
    if (args_.skip) {
      for (int i = 0; i < kBlock; ++i) own_.out[i] += args_.skip[head_] * own_.value[i];
    }
    Storage* out = static_cast<Storage*>(args_.out) + (row * args_.value_heads + head_) * args_.value_dim;
    store_numbers<Format>(own_.out, out + block_.first, block_.width);
  }

  const LinearAttentionRowsArgs& args_;
  const ChannelBlock& block_;
  const SequenceRows rows_;
  const std::int64_t head_, key_head_;
  AttentionScratch own_;
};

template <typename Format>
void linear_attention_task(const LinearAttentionRowsArgs& args, const ChannelBlock& block, float* scratch) {
  AttentionTask<Format>(args, block, scratch).run();
}

}  // namespace SPECDEC_ISA
}  // namespace specdec
