package train

import (
	"encoding/json"
	"fmt"
)

// An earlyStop counts the validations since the loss last improved.
type earlyStop struct {
	Lowest *float64 `json:"lowest"` // finite loss; nil before the first
	Since  int      `json:"since"`
}

// earlyStopState names it in checkpoints.
const earlyStopState = "early_stop"

// add adds the loss of a validation. One that is not finite is no improvement.
func (e *earlyStop) add(loss, minDelta float64) {
	finite := loss-loss == 0
	if e.Since++; finite && (e.Lowest == nil || *e.Lowest-loss > minDelta) {
		e.Since = 0
	}
	if finite && (e.Lowest == nil || loss < *e.Lowest) {
		e.Lowest = &loss
	}
}

// String describes the count.
func (e earlyStop) String() string {
	lowest := "none was finite"
	if e.Lowest != nil {
		lowest = fmt.Sprintf("lowest %.4f", *e.Lowest)
	}
	return fmt.Sprintf("%d validations in a row did not improve the loss (%s)", e.Since, lowest)
}

// restore reads the count from a checkpoint.
func (e *earlyStop) restore(extra map[string]json.RawMessage) error {
	text, ok := extra[earlyStopState]
	if !ok {
		return nil
	}
	if err := json.Unmarshal(text, e); err != nil || e.Since < 0 {
		return fmt.Errorf("%s in the checkpoint's manifest: %s is no count of validations", earlyStopState, text)
	}
	return nil
}
