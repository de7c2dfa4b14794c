// Compiled once per instruction set with its own flags: LANES floats per vector, NAME of the table.
// Nothing of the C++ library is used, so that no inline function of it can carry one set's code to another.
#include "attention.h"
#include "codec.h"
#include "prefill.h"

#define TEXT(x) #x
#define STRING(x) TEXT(x)

namespace longleaf {

extern const InstructionSet NAME = {STRING(NAME),  attend_scratch, attend, prefill_scratch, prefill_items,
                                   prefill, recode_scratch, encode, decode};

}  // namespace longleaf
