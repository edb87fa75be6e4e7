package terminal

import (
	"errors"
	"fmt"
)

// MaxFaults is how many faults of one file or directory are told, and the rest counted: what is
// wrong with a hundred thousand names is seen from the first.
const MaxFaults = 20

// Faults collects what is wrong, up to MaxFaults.
type Faults struct {
	list []error
	more int
}

// Add adds a fault; nil is none. It reports whether there is room for more: a search that costs
// much may end there.
func (f *Faults) Add(err error) (room bool) {
	switch {
	case err == nil:
	case f.Full():
		f.more++
	default:
		f.list = append(f.list, err)
	}
	return !f.Full()
}

// Addf adds a fault that is made only where it is kept.
func (f *Faults) Addf(format string, args ...any) {
	if f.Full() {
		f.more++
		return
	}
	f.Add(fmt.Errorf(format, args...))
}

// Full says that no more faults are told.
func (f *Faults) Full() bool { return len(f.list) >= MaxFaults }

// Err returns all of them as one error, nil where there is none.
func (f *Faults) Err() error {
	if f.more > 0 {
		return errors.Join(append(f.list[:len(f.list):len(f.list)], fmt.Errorf("and %d faults more of these kinds",
			f.more))...)
	}
	return errors.Join(f.list...)
}
