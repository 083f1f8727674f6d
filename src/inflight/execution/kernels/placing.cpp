#include "placing.h"

#include "checks.h"

namespace inflight {

void put_rows(Current<PlacedRows>& placing, const PlacedRows& placed) {
  const auto& [rows, places, adds] = placed;
  check_rows(rows, "encoder outputs");
  check_whole(rows, "encoder outputs", 2, rows.scalar_type());
  check_whole(places, "placeholders", 1, kLong);
  check_size(places, "placeholders", 0, rows.size(0));
  placing.set(std::make_shared<PlacedRows>(placed));
}

void place_rows(const Tensor& states, Current<PlacedRows>& placing) {
  const std::shared_ptr<const PlacedRows> placed = placing.get();
  const auto& [rows, places, adds] = *placed;
  if (!rows.defined()) return;
  placing.set(std::make_shared<PlacedRows>());
  check_whole(states, "hidden states", 2, rows.scalar_type());
  check_size(states, "hidden states", 1, rows.size(1));
  const int64_t size = rows.size(1);
  with_dtype(rows, [&]<class Value>(Value) {
    for (int64_t i = 0; i < rows.size(0); ++i) {
      const int64_t place = places.const_data_ptr<int64_t>()[i];
      CHECK(place >= 0 && place < states.size(0), "a step has no token ", place, " for an encoder output");
      const Value* from = rows.const_data_ptr<Value>() + i * size;
      Value* to = states.data_ptr<Value>() + place * size;
      for (int64_t k = 0; k < size; ++k) to[k] = adds ? Value(float(to[k]) + float(from[k])) : from[k];
    }
  });
}

}  // namespace inflight
