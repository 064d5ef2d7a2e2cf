// The versions of a kernel, one per instruction set: those that this machine can run, and the one in use.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace specdec {

// `Code` is a version's code: pointers to its functions.
template <typename Code>
class Versions {
 public:
  struct Version {
    const char* name;
    Code code;
  };

  // `usable` lists the versions that this machine can run, the best last. The best is chosen.
  Versions(const char* kernel, std::vector<Version> usable)
      : kernel_(kernel), usable_(std::move(usable)), chosen_(usable_.back().code) {}

  const Code& chosen() const { return chosen_; }

  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const Version& version : usable_) names.emplace_back(version.name);
    return names;
  }

  void choose(const std::string& name) {
    for (const Version& version : usable_) {
      if (version.name == name) {
        chosen_ = version.code;
        return;
      }
    }
    throw std::invalid_argument(std::string(kernel_) + " has no version '" + name + "' that this machine can run");
  }

 private:
  const char* kernel_;
  std::vector<Version> usable_;
  Code chosen_;
};

}  // namespace specdec
