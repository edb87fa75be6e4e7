package blame

import (
	"errors"
	"testing"
	"time"
)

// A waits value has the rank that each rank waits for, or -1.
type waits []int

func (w waits) Ranks() int               { return len(w) }
func (w waits) WaitsFor(rank int) int    { return w[rank] }
func (w waits) PeerName(rank int) string { return RankName(rank, "node-a") }

func TestStalled(t *testing.T) {
	for name, c := range map[string]struct {
		waits waits
		own   int
		peers []int
		rank  int
		text  string
	}{
		"the peer":        {waits{1, -1, -1}, 0, []int{1}, 1, "rank 1 (node-a): receive of 8 bytes: no progress for 1s, the deadline"},
		"end of a chain":  {waits{1, 2, 3, -1}, 0, []int{1}, 3, "rank 3 (node-a): receive of 8 bytes from rank 1 (node-a), which waits itself: no progress for 1s, the deadline"},
		"a circle":        {waits{1, 2, 0}, 0, []int{1}, 1, "rank 1 (node-a): receive of 8 bytes: no progress for 1s, the deadline"},
		"a circle beside": {waits{1, 2, 1}, 0, []int{1}, 1, "rank 1 (node-a): receive of 8 bytes: no progress for 1s, the deadline"},
		"not oneself":     {waits{-1, 0, -1}, 0, []int{1}, 1, "rank 1 (node-a): receive of 8 bytes: no progress for 1s, the deadline"},
		"one of several":  {waits{1, 0, -1}, 0, []int{1, 2}, 2, "rank 2 (node-a): receive of 8 bytes: no progress for 1s, the deadline"},
		"all of several":  {waits{1, 3, 3, 4, -1}, 0, []int{1, 2}, 4, "rank 4 (node-a): receive of 8 bytes from rank 1 (node-a), which waits itself: no progress for 1s, the deadline"},
	} {
		err := Stalled(c.waits, c.own, c.peers, Message(false, 8), time.Second)
		if err.Rank != c.rank || err.Error() != c.text || !errors.Is(err, ErrDeadline) || !IsRemote(err) {
			t.Errorf("%s: rank %d, %q; want rank %d, %q", name, err.Rank, err, c.rank, c.text)
		}
	}
}

// The form of a cause depends on who tells it, and the blame never moves.
func TestForms(t *testing.T) {
	boom := errors.New("boom")
	own := OwnForm(boom)
	if !errors.Is(own, ErrAborted) || !errors.Is(own, boom) || IsRemote(own) || own.Error() != "group aborted: boom" {
		t.Errorf("own form %q", own)
	}
	if again := OwnForm(own); again != own {
		t.Errorf("the own form of an own form is %q", again)
	}
	told := PeerForm(3, "rank 3", own)
	if told.Rank != 3 || !errors.Is(told, boom) || told.Error() != "rank 3: group aborted: boom" {
		t.Errorf("peer form %q", told)
	}
	if passed := PeerForm(5, "rank 5", OwnForm(told)); passed != told {
		t.Errorf("a victim passes on %q", passed)
	}
	if OwnForm(nil) != ErrAborted {
		t.Error("no cause is no abort")
	}
}

// The waits of a rank's parts do not hide each other, and the oldest is told.
func TestStanding(t *testing.T) {
	var s WaitState
	for i, c := range []struct {
		who        string
		peer, want int
	}{{"world", 3, 3}, {"save", 5, 3}, {"world", 4, 4}, {"other", -1, 4}, {"world", -1, 5}, {"world", 7, 5}, {"save", -1, 7}, {"world", -1, -1}} {
		if got := s.Set(c.who, c.peer); got != c.want {
			t.Errorf("step %d, %s waits for %d: the rank waits for %d, want %d", i, c.who, c.peer, got, c.want)
		}
	}
}

// An alarm wakes all who have asked before it, once.
func TestAlarm(t *testing.T) {
	var a Alarm
	a.ring()
	one, other := a.Next(), a.Next()
	a.ring()
	<-one
	<-other
	select {
	case <-a.Next():
		t.Error("an alarm that has not rung wakes")
	default:
	}
}
