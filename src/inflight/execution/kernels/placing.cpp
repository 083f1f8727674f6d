#include "placing.h"

#include "checks.h"

namespace inflight {

void put_rows(Current<PlacedRows>& placing, const Tensor& rows, const Tensor& places) {
  check_rows(rows, "encoder outputs");
  check_whole(rows, "encoder outputs", 2, rows.scalar_type());
  check_whole(places, "placeholders", 1, kLong);
  check_size(places, "placeholders", 0, rows.size(0));
  placing.set(std::make_shared<PlacedRows>(PlacedRows{rows, places}));
}

void place_rows(const Tensor& embeddings, Current<PlacedRows>& placing) {
  const std::shared_ptr<const PlacedRows> placed = placing.get();
  const auto& [rows, places] = *placed;
  if (!rows.defined()) return;
  placing.set(std::make_shared<PlacedRows>());
  check_whole(embeddings, "embeddings", 2, rows.scalar_type());
  check_size(embeddings, "embeddings", 1, rows.size(1));
  const int64_t num_bytes = rows.size(1) * rows.element_size();
  for (int64_t i = 0; i < rows.size(0); ++i) {
    const int64_t place = places.const_data_ptr<int64_t>()[i];
    CHECK(place >= 0 && place < embeddings.size(0), "a step has no token ", place, " for an encoder output");
    std::memcpy(static_cast<char*>(embeddings.data_ptr()) + place * num_bytes,
                static_cast<const char*>(rows.const_data_ptr()) + i * num_bytes, num_bytes);
  }
}

}  // namespace inflight
