package cluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/launch"
)

// The effects of a tracedAgent, in the words of its events.

func (a *tracedAgent) effect(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if !a.passing.IsZero() {
		text = fmt.Sprintf("+%v %s", a.m.now.Sub(a.passing), text)
	}
	a.effects = append(a.effects, text)
}

func (a *tracedAgent) dial(addr string) {
	a.dials = append(a.dials, addr)
	a.effect("dial %s", nameOf(addr))
}
func (a *tracedAgent) hangUp(name string) { a.effect("hang up %s", name) }
func (a *tracedAgent) prepare(w Assignment) {
	a.effect("prepare %d: %s", w.Generation, shown(w.Members, false))
}
func (a *tracedAgent) begin(d *decision)  { a.effect("launcher: start %d", d.Index) }
func (a *tracedAgent) news(n launch.News) { a.effect("launcher: news %s", newsText(n)) }
func (a *tracedAgent) gone()              { a.effect("left") }

func (a *tracedAgent) claim(payload []byte, d *decision) {
	if a.claimed = d; d == nil {
		a.effect("read the run directory of payload %q", payload)
		return
	}
	a.effect("claim in the run directory of payload %q: %s", payload, d.text())
}

func (a *tracedAgent) over(err error) {
	over := (*launch.Over)(nil)
	if !errors.As(err, &over) {
		a.t.Errorf("the wait for a start ends with %v", err)
		return
	}
	a.effect("launcher: over %s%s", resultText(&over.Result), because(over.Error()))
}

func (a *tracedAgent) verdict(v launch.Verdict) {
	text := resultText(&v.Result)
	if v.Again {
		text = "again, " + text
	}
	if v.ReportedElsewhere {
		text += ", reported elsewhere"
	}
	for _, f := range v.Failures {
		text += "; " + failureText(&f)
	}
	for _, n := range v.Notes {
		text += "; note: " + n
	}
	a.effect("launcher: verdict %s", text)
}

func resultText(r *launch.Result) string {
	text := fmt.Sprint("status ", r.ExitCode)
	if r.Stopped {
		text += " stopped"
	}
	if r.Restarts > 0 {
		text += fmt.Sprint(" restarts=", r.Restarts)
	}
	if r.First != nil {
		text += fmt.Sprint(" first=", r.First.Rank)
	}
	if r.Err != nil {
		text += fmt.Sprintf(" error %q", r.Err)
	}
	return text
}

func failureText(f *launch.Failure) string {
	return fmt.Sprintf("%v, %d last lines", f.Error(), len(f.Tail))
}

// send notes the message as it arrives. Equal ones in a row share a line.
func (a *tracedAgent) send(m *message, names ...string) {
	if raw, err := json.Marshal(m); err != nil {
		a.t.Error(err)
	} else if m, err = decodeMessage(raw); err != nil {
		a.t.Error(err)
	}
	for _, name := range names {
		text := ": " + messageText(m)
		if n := len(a.effects); n > 0 && a.lastSent == a.m.now.String()+text && strings.HasSuffix(a.effects[n-1], text) {
			a.effects[n-1] = strings.TrimSuffix(a.effects[n-1], text) + " " + name + text
		} else {
			a.effect("to %s%s", name, text)
		}
		a.lastSent = a.m.now.String() + text
	}
}

func messageText(m *message) string {
	switch {
	case m.Status != nil:
		text := fmt.Sprint("status ", m.Status.Index)
		if l := m.Status.Leader; l.Name != "" {
			text += fmt.Sprint(" leader=", l.Name)
		}
		if m.Status.Term > 0 {
			text += fmt.Sprint(" term=", m.Status.Term)
		}
		if m.Status.Candidate {
			text += " candidate"
		}
		return text
	case m.Join != nil && m.Join.Ended != nil:
		return "join " + endedText(m.Join.Ended)
	case m.Join != nil:
		return "join"
	case m.Refuse != nil:
		return "refuse: " + *m.Refuse
	case m.Note != nil:
		return "note: " + *m.Note
	case m.Decided != nil:
		return m.Decided.text()
	case m.News != nil:
		return fmt.Sprintf("news %d %s", m.News.Index, newsText(m.News.News))
	case m.Ended != nil:
		return endedText(m.Ended)
	case m.Again != nil:
		return fmt.Sprintf("again %d%s", m.Again.Index, tallyText(m.Again.Tally))
	}
	text := fmt.Sprint("bye ", m.Bye.Status)
	if m.Bye.All {
		text += " all"
	}
	return text + because(m.Bye.Why)
}

func because(why string) string {
	if why == "" {
		return ""
	}
	return ": " + why
}

func tallyText(t tally) (text string) {
	if t.Retries.Done > 0 {
		text += fmt.Sprint(" restarts=", t.Retries.Done)
	}
	if t.Cause != "" {
		text += fmt.Sprintf(" cause=%s*%d", t.Cause, t.InRow)
	}
	for _, k := range slices.Sorted(maps.Keys(t.Lost)) {
		text += fmt.Sprintf(" lost=%s*%d", k, t.Lost[k])
	}
	return text
}

func (d *decision) text() string {
	text := fmt.Sprintf("decided %d by=%s", d.Index, d.Leader.Name)
	if d.End == nil {
		text += " " + shown(d.Assignment.Members, false)
		if len(d.Payload) > 0 {
			text += fmt.Sprintf(" payload=%s", d.Payload)
		}
		return text + tallyText(d.Tally) + fmt.Sprint(" target=", d.Tally.Target)
	}
	text += fmt.Sprint(" end=", d.End.ExitCode)
	if d.End.Stopped {
		text += " stopped"
	}
	if d.End.First != nil {
		text += fmt.Sprintf(" (%s)", failureText(d.End.First))
	}
	return text + tallyText(d.Tally) + because(d.End.Why)
}

func endedText(e *ended) string {
	text := fmt.Sprint("ended ", e.Index)
	for _, f := range e.Ending.Failures {
		text += fmt.Sprint(" rank=", f.Rank)
	}
	return text + fmt.Sprint(" step=", e.Ending.Step) + because(e.Fault)
}

func newsText(n launch.News) string {
	switch {
	case n.Failed != nil:
		return fmt.Sprint("failed=", *n.Failed) + because(n.Lost)
	case n.Addrs != nil:
		return fmt.Sprint("addrs=", len(n.Addrs))
	case n.Stop != "":
		return "stop: " + n.Stop
	case n.Kill:
		return "kill"
	case n.Ask:
		return "ask"
	case n.WaitStates != nil:
		return fmt.Sprint("states=", len(n.WaitStates))
	}
	return "lost: " + n.Lost
}
