// SPDX-License-Identifier: Apache-2.0
// STAND-IN for tests, not Ascend software: libmetadef.so's AscendString.
#include "published.hpp"

namespace ge {

namespace {

const std::string &text(const std::shared_ptr<std::string> &name) {
    static const std::string empty;
    return name ? *name : empty;
}

}  // namespace

AscendString::AscendString(const char *name) {
    if (name != nullptr) name_ = std::make_shared<std::string>(name);
}

AscendString::AscendString(const char *name, size_t length) {
    if (name != nullptr) name_ = std::make_shared<std::string>(name, length);
}

const char *AscendString::GetString() const {
    return text(name_).c_str();
}
size_t AscendString::GetLength() const {
    return text(name_).size();
}
bool AscendString::operator<(const AscendString &other) const {
    return text(name_) < text(other.name_);
}
bool AscendString::operator>(const AscendString &other) const {
    return text(name_) > text(other.name_);
}
bool AscendString::operator<=(const AscendString &other) const {
    return text(name_) <= text(other.name_);
}
bool AscendString::operator>=(const AscendString &other) const {
    return text(name_) >= text(other.name_);
}
bool AscendString::operator==(const AscendString &other) const {
    return text(name_) == text(other.name_);
}
bool AscendString::operator!=(const AscendString &other) const {
    return text(name_) != text(other.name_);
}

}  // namespace ge
