package checkpoint

import (
	"encoding/json"
	"errors"
	"fmt"
)

// RankError is the error of a save on the ranks that did their part: it names the rank that failed.
// That rank itself returns Err.
type RankError struct {
	Rank int
	Err  error
}

// Error returns "rank 2: " and the error.
func (e *RankError) Error() string { return fmt.Sprintf("rank %d: %v", e.Rank, e.Err) }

// Unwrap returns the error of that rank. On other ranks it is a text alone.
func (e *RankError) Unwrap() error { return e.Err }

// RetryError marks a failed save after which every rank can save again. The second failure in a row is
// not marked: its cause has lasted.
type RetryError struct {
	Err error // with the step
}

// Error returns the text of the error.
func (e *RetryError) Error() string { return e.Err.Error() }

// Unwrap returns the error.
func (e *RetryError) Unwrap() error { return e.Err }

// faults lists the failures of a save, at most one for each rank.
type faults []*RankError

// seenBy returns the error for a rank to report: its own fault if it has one, else all of them.
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
	Faults faults
	Final  bool // a newer start has begun: no later save can succeed
}

type faultText struct {
	Rank  int    `json:"rank"`
	Error string `json:"error"`
}

// MarshalJSON sends the text of the error.
func (e *RankError) MarshalJSON() ([]byte, error) {
	return json.Marshal(faultText{e.Rank, e.Err.Error()})
}

// UnmarshalJSON takes the text for the error.
func (e *RankError) UnmarshalJSON(data []byte) error {
	var t faultText
	if err := json.Unmarshal(data, &t); err != nil {
		return err
	}
	e.Rank, e.Err = t.Rank, errors.New(t.Error)
	return nil
}

func encode(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("checkpoint: JSON of %T: %v", v, err)) // strings and integers alone
	}
	return b
}

func errText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
