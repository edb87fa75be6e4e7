package cluster

import (
	"encoding/json"
	"reflect"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/launch"
)

// samples returns typical messages.
func samples() []*message {
	rank, text := 3, "why"
	at := PeerAddr{"a-1", "10.0.0.1:29400"}
	w := Assignment{Generation: 2, Restart: 1, Size: 4, Members: []Member{
		{Name: "a-1", Host: "a", HostID: "x", NodeRank: 0, FirstRank: 0, NProc: 2, Addr: "10.0.0.1:29400"},
		{Name: "b-2", Host: "b", HostID: "y", NodeRank: 1, FirstRank: 2, NProc: 2, Addr: "[fe80::1]:29400"},
	}}
	d := decision{
		Index: 2, Leader: at, Assignment: w, Payload: []byte("payload"), Secret: []byte("secret"),
		Tally: tally{
			Retries: launch.Retries{Max: 3, Done: 1, Reached: 7}, Cause: "x#0", InRow: 1, Lost: map[string]int{"y#1": 1},
			Target: 2,
		},
	}
	end := d
	end.End = &outcome{ExitCode: 1, Restarts: 1, First: &launch.Failure{Rank: 3, Cause: "killed", Tail: []string{"x"}}}
	e := &ended{2, launch.Ending{Failures: []launch.Failure{{Rank: 3}}, Step: 7}, "fault"}
	return []*message{
		{Status: &status{2, at, 1, true}}, {Status: &status{}}, {Join: &join{}}, {Join: &join{e}},
		{Refuse: &text}, {Note: &text},
		{Decided: &d}, {Decided: &end}, {News: &relayed{2, launch.News{Failed: &rank, Lost: "gone"}}}, {Ended: e},
		{Again: &again{2, d.Tally}}, {Bye: &bye{75, "asked", true}},
	}
}

func TestMessagesArriveAsTheyWere(t *testing.T) {
	for _, m := range samples() {
		raw, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		got, err := decodeMessage(raw)
		if err != nil || !reflect.DeepEqual(got, m) {
			t.Errorf("%s: %+v, %v", raw, got, err)
		}
	}
}

func FuzzMessage(f *testing.F) {
	for _, m := range samples() {
		raw, err := json.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	f.Add([]byte(`{"status":{"index":1},"note":"x"}`))
	f.Add([]byte(`{"decided":{"index":1,"leader":{"Name":"a","Addr":"10.0.0.1:1"},"world":{"generation":1,` +
		`"agents":[{"name":"a"}]}}}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		m, err := decodeMessage(raw)
		if err != nil {
			return
		}
		again, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := decodeMessage(again); err != nil {
			t.Errorf("%s is refused: %v", again, err)
		}
		// An agent in a start accepts every valid message.
		s := newSim(1)
		a := s.add(simConfig(2, 3), func(c *Config) { c.Port = 1 })
		b := s.add(simConfig(2, 3), nil)
		s.until(s.between(3e9, 3e9), s.everyone)
		a.do(func() { a.coord.receive(b.coord.self.Name, m) })
		b.do(func() { b.coord.receive(a.coord.self.Name, m) })
	})
}

func FuzzHello(f *testing.F) {
	c := newCoordinator(&Config{Program: "v1", Inputs: "x"}, memberOf("a", -1), nil, time.Time{})
	raw, err := json.Marshal(helloOf(c))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(raw)
	f.Fuzz(func(t *testing.T, raw []byte) {
		if h, err := decodeHello(raw); err == nil {
			if err := h.Member.check(); err != nil {
				t.Error(err)
			}
		}
	})
}
