package experiment

import "github.com/cprun/cprun/internal/bench"

// Work is a run as far as its time is known.
type Work struct {
	Steps     int
	Predicted float64 // seconds of a step, as planned; 0: not known
	Measured  float64 // seconds of a step, in an earlier run of the cell; 0: none
	Seconds   float64 // of the whole run, if it has ended well; 0: it has not
	Limit     float64 // seconds after which it is ended; 0: none
}

// Left returns the seconds that the runs of pending take, by those of ended; ok is false where
// nothing is known. What is predicted is corrected by how the ended runs compare with their
// predictions; a run takes its start beside its steps.
func Left(ended, pending []Work) (seconds float64, ok bool) {
	if len(pending) == 0 {
		return 0, true
	}
	var starts, whole, ratios []float64
	for _, w := range ended {
		if w.Seconds == 0 {
			continue
		}
		whole = append(whole, w.Seconds)
		if w.Measured > 0 {
			starts = append(starts, max(0, w.Seconds-float64(w.Steps)*w.Measured))
		}
		if w.Measured > 0 && w.Predicted > 0 {
			ratios = append(ratios, w.Measured/w.Predicted)
		}
	}
	start, mean, ratio := bench.Median(starts), bench.Median(whole), 1.0
	if len(ratios) > 0 {
		ratio = bench.Median(ratios)
	}
	for _, w := range pending {
		each := mean
		switch {
		case w.Measured > 0:
			each = start + float64(w.Steps)*w.Measured
		case w.Predicted > 0:
			each = start + float64(w.Steps)*w.Predicted*ratio
		case mean == 0:
			return 0, false
		}
		if w.Limit > 0 {
			each = min(each, w.Limit)
		}
		seconds += each
	}
	return seconds, true
}
