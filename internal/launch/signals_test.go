package launch

import (
	"errors"
	"os"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func TestSignalsBeforeAJob(t *testing.T) {
	s := CatchSignals()
	defer s.Release()
	fault := errors.New("no such file")
	if asked, err := s.Before(func() error { return fault }); asked != "" || !errors.Is(err, fault) {
		t.Errorf("without a request: %q, %v", asked, err)
	}
	on := make(chan struct{})
	defer close(on)
	asked, err := s.Before(func() error {
		unix.Kill(os.Getpid(), syscall.SIGUSR1)
		<-on
		return nil
	})
	if asked != "SIGUSR1" || err != nil {
		t.Errorf("asked while input is checked: %q, %v", asked, err)
	}
}

// A request that came before the workers were there is passed on to them.
func TestSignalsAreHandedToTheJob(t *testing.T) {
	s := CatchSignals()
	s.c <- syscall.SIGTERM
	r := play(t, "stop", 2, func(j *Job) { j.Signals = s })
	if r.ExitCode != ExitStopped || !strings.Contains(r.stderr, "SIGTERM: the workers are asked for a checkpoint") {
		t.Errorf("%+v, stderr %q", r.Result, r.stderr)
	}
}
