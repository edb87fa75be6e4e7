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
		unix.Kill(os.Getpid(), syscall.SIGQUIT) // ends nothing
		unix.Kill(os.Getpid(), syscall.SIGUSR1)
		<-on
		return nil
	})
	if asked != "SIGUSR1" || err != nil {
		t.Errorf("asked while input is checked: %q, %v", asked, err)
	}
}

// TestSignalsAreHandedToTheJob checks that a request to stop that came before the workers is passed on to them.
func TestSignalsAreHandedToTheJob(t *testing.T) {
	s := CatchSignals()
	defer s.Release()
	s.c <- syscall.SIGTERM
	r := play(t, "stop", 2, func(j *Job) { j.Signals = s })
	if r.ExitCode != ExitStopped || !strings.Contains(r.stderr, "SIGTERM: the workers are asked for a checkpoint") {
		t.Errorf("%+v, stderr %q", r.Result, r.stderr)
	}
}

// What comes when all is done does not change how the program ends, and cannot hang it either.
func TestSignalsAfterTheEnd(t *testing.T) {
	t.Parallel()
	for _, sent := range []int{1, 2} { // after one, the program gets a while to end by itself
		s := CatchSignals()
		ended := make(chan int, 1)
		s.Conclude(ExitDone, func(status int) { ended <- status })
		for range sent {
			s.c <- syscall.SIGTERM
		}
		if status := <-ended; status != ExitDone {
			t.Errorf("%d signals: status %d, want %d", sent, status, ExitDone)
		}
		s.Release()
	}
}

func TestCheckSpace(t *testing.T) {
	for limit, fine := range map[uint64]bool{700 << 20: false, leastSpace: true, 1 << 40: true} {
		if err := checkSpace(limit, true); (err == nil) != fine ||
			err != nil && !strings.Contains(err.Error(), "ulimit -v") {
			t.Errorf("a limit of %d bytes: %v", limit, err)
		}
	}
	if err := checkSpace(0, false); err != nil {
		t.Errorf("without a limit: %v", err)
	}
}
