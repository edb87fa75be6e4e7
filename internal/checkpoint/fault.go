package checkpoint

import (
	"encoding/json"
	"errors"
	"fmt"
)

// RankError is the error of a save as the ranks report it on which nothing went wrong: it names
// the rank whose disk, or whose part, failed. That rank itself reports Err.
type RankError struct {
	Rank int
	Err  error
}

// Error returns "rank 2: " and the error.
func (e *RankError) Error() string { return fmt.Sprintf("rank %d: %v", e.Rank, e.Err) }

// Unwrap returns the error of that rank. On other ranks it is a text alone.
func (e *RankError) Unwrap() error { return e.Err }

// faults are what went wrong in a save, at most once for each rank.
type faults []*RankError

// seenBy is the error that a rank reports of a save: its own fault, where it has one, else all.
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

// verdict is how rank 0 tells the others whether the checkpoint is whole.
type verdict struct {
	Faults faults
}

// encode is the verdict as JSON, the faults as texts.
func (v verdict) encode() []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("checkpoint: verdict: %v", err)) // integers and strings alone
	}
	return b
}

// faultText is a RankError as it is sent.
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

func errText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
