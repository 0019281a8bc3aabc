#include "server/transfer/report.h"

namespace spectrumkv {

const char* StageName(Stage stage) {
  static const char* const kNames[kStageCount] = {"queue", "scan", "plan", "encode",
                                                  "send", "receive", "decode", "commit"};
  return kNames[static_cast<size_t>(stage)];
}

}  // namespace spectrumkv
