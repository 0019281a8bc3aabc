#include <map>
#include <string>
#include <vector>

#include "client/ctl/dispatch.h"

extern char** environ;

int main(int argc, char** argv) {
  std::map<std::string, std::string> env;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const size_t equals = text.find('=');
    if (equals != std::string::npos) env[text.substr(0, equals)] = text.substr(equals + 1);
  }
  return spectrumkv::ctl::Main({argv + 1, argv + argc}, env);
}
