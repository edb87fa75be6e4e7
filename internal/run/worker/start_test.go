package worker

import (
	"regexp"
	"testing"
	"time"
)

func TestStartIsOneLine(t *testing.T) {
	s := &start{began: time.Now()}
	gpu := s.time("GPU")
	weights := s.time("weights")
	weights()
	gpu()
	want := regexp.MustCompile(`^first step done in \d+\.\d\d s: GPU ` +
		`\d+\.\d\d, weights \d+\.\d\d \(s; parts may overlap\)$`)
	if got := s.String(); !want.MatchString(got) {
		t.Errorf("%q, want %v", got, want)
	}
}
