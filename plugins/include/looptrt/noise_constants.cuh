// Constants of the noise, equal to those of plugins/noise.py digit for digit (a test compares).
#pragma once

#include <cstdint>

namespace looptrt {

constexpr uint64_t kSeedKey = 0x6A09E667F3BCC909;
constexpr uint64_t kPositionKey = 0xBB67AE8584CAA73B;
constexpr uint64_t kChannelKey = 0x3C6EF372FE94F82B;

constexpr double kTailProbability = 0.0013498980316300946;
constexpr double kCentre = 0.40625;
__constant__ double const kCentreTop[] = {
    2.506628274631039,  -26.282632438564846, 98.5654153372488,
    -156.1416265720055, 92.04679467386218,   -10.17733294481539,
};
__constant__ double const kCentreBottom[] = {
    1.0,
    -11.532450871168004,
    49.09575817619416,
    -93.3967556728517,
    74.7818870293718,
    -17.53071637851671,
};
__constant__ double const kTailTop[] = {
    4.968010601901514, 1635.6220194671469, 94441.78478828217,  1381774.616339814,
    4121153.951285866, -5923508.5815925,   -7613761.384551315, 4899787.298407226,
};
__constant__ double const kTailBottom[] = {
    1.0,
    412.7725531161313,
    29338.129014538492,
    564135.1816576454,
    3016580.0417480352,
    2323436.014406222,
    -3657536.9385840204,
    -249225.2603991401,
};

}  // namespace looptrt
