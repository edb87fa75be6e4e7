package worker

import (
	"regexp"
	"testing"
)

func TestStartIsOneLine(t *testing.T) {
	s := newStart()
	gpu := s.time("GPU")
	weights := s.time("weights")
	weights()
	gpu()
	want := regexp.MustCompile(`^first step done in \d+\.\d\d s: GPU \d+\.\d\d, weights \d+\.\d\d \(s; parts may overlap\)$`)
	if got := s.String(); !want.MatchString(got) {
		t.Errorf("%q, want %v", got, want)
	}
}
