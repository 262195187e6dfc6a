#pragma once

namespace flux {

constexpr int kNumSms = 132;  // of the H100 SXM and the H200; on others what is computed of it is rough, not wrong

}  // namespace flux
