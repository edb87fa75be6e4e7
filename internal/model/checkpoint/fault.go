package checkpoint

import (
	"encoding/json"
	"errors"
	"fmt"
)

// RankError is the error of a save on the ranks that did not fail. It names the failed rank, which itself returns Err.
type RankError struct {
	Rank int
	Err  error
}

// Error returns "rank 2: " and the error.
func (e *RankError) Error() string { return fmt.Sprintf("rank %d: %v", e.Rank, e.Err) }

// Unwrap returns the error of that rank; on other ranks only its text.
func (e *RankError) Unwrap() error { return e.Err }

// RetryError marks a failed save after which every rank can save again. A second failure in a row is not marked, since
// its cause persists.
type RetryError struct {
	error // includes the step
}

// Unwrap returns the error.
func (e *RetryError) Unwrap() error { return e.error }

// faults lists the failures of a save, at most one for each rank.
type faults []*RankError

// seenBy returns the error that a rank reports: its own fault, else all faults.
func (fs faults) seenBy(rank int) error {
	var errs []error
	for _, f := range fs {
		if f.Rank == rank {
			return f.Err
		}
		errs = append(errs, f)
	}
	return errors.Join(errs...)
}

// A verdict is rank 0's message to all ranks: whether the checkpoint is complete.
type verdict struct {
	Faults []faultText
	Final  bool // a newer start exists, so no later save can succeed
}

type faultText struct {
	Rank  int    `json:"rank"`
	Error string `json:"error"`
}

func encode(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("checkpoint: JSON of %T: %v", v, err)) // only strings and integers
	}
	return b
}

func errText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
