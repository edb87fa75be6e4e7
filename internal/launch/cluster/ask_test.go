package cluster

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/cluster/wire"
	"github.com/cprun/cprun/internal/launch/waits"
)

// TestWhoAsksIsTold checks that only the asking agent gets the wait states of all others.
func TestWhoAsksIsTold(t *testing.T) {
	hosts := joinAll(t, 3, nil)
	forAll(t, hosts, func(h *host) error {
		s, err := h.starts(t.Context())
		if err != nil {
			return err
		}
		if s.Ranks.FirstRank == 2 {
			h.Publish(launch.News{Ask: true})
			ranks := map[int]bool{}
			for len(ranks) < 2 {
				n := <-h.News()
				if len(n.WaitStates) != 1 || n.WaitStates[0].State != "x" {
					return fmt.Errorf("news %+v, want what a rank waits for", n)
				}
				ranks[n.WaitStates[0].Rank] = true
			}
			if !ranks[0] || !ranks[4] {
				return fmt.Errorf("ranks %v", ranks)
			}
		} else {
			if n := <-h.News(); !n.Ask {
				return fmt.Errorf("news %+v, want a question", n)
			}
			h.Publish(launch.News{WaitStates: []waits.WaitState{{Rank: s.Ranks.FirstRank, State: "x"}}})
		}
		v := h.End(t.Context(), launch.Ending{Step: 3})
		select {
		case n := <-h.News():
			return fmt.Errorf("news %+v, want no more", n)
		default:
		}
		return h.Close(v.ExitCode, "")
	})
}

// TestAnEndingFitsAMessage checks that an ending of many ranks with long wait states fits a message.
func TestAnEndingFitsAMessage(t *testing.T) {
	var e launch.Ending
	for r := range 1000 {
		s := waits.WaitState{Rank: r, Host: strings.Repeat("h", 96), Phase: "step"}
		for range waits.MaxWaits {
			s.Waits = append(
				s.Waits,
				waits.Wait{
					Op:      "exchange",
					Label:   strings.Repeat("l", 96),
					Open:    make([]waits.Open, waits.MaxOpen),
					Stalled: time.Hour,
				},
			)
		}
		e.Failures = append(e.Failures, launch.Failure{Rank: r, Cause: "no progress", WaitState: &s})
	}
	raw, err := json.Marshal(&message{Ended: &ended{Ending: trim(e)}})
	if err != nil || len(raw) > wire.MaxFrame/2 {
		t.Errorf("%d bytes, %v", len(raw), err)
	}
	if w := e.Failures[500].WaitState.Waits; len(w) != waits.MaxWaits || len(w[0].Open) != waits.MaxOpen {
		t.Error("the agent's own were cut as well")
	}
	if w := trim(e).Failures[100].WaitState.Waits; len(w) != 1 || w[0].More == 0 {
		t.Errorf("%+v", w)
	}
}
