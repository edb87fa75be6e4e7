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
	want := `^first step done in \d+\.\d\d s: GPU \d+\.\d\d, weights \d+\.\d\d \(s; parts may overlap\)`
	if got := s.String(); !regexp.MustCompile(want + "$").MatchString(got) {
		t.Errorf("%q, want %v", got, want)
	}
	s.usage = func() string { return "memory 3 GiB" }
	if got := s.String(); !regexp.MustCompile(want + "; memory 3 GiB$").MatchString(got) {
		t.Errorf("%q, want %v and the memory", got, want)
	}
}
