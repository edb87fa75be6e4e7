package gossip

import (
	"flag"
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

var simAgents = flag.Int("gossip.agents", 32, "agents that TestSimulation has")

// A crowd is agents on simulated hosts.
type crowd struct {
	t    *testing.T
	net  *Network
	here []*agent
}

// gather starts n agents within a second. All meet the first.
func (w *crowd) gather(n int) {
	for i := range n {
		w.here = append(w.here, start(w.t, w.net.Host(i), "simulation", nil))
		if i > 0 {
			w.here[i].Meet(w.here[0].addr)
		}
		time.Sleep(time.Second / time.Duration(n))
	}
}

// together returns n agents that know each other.
func together(t *testing.T, net *Network, n int) *crowd {
	w := &crowd{t: t, net: net}
	w.gather(n)
	w.agree(time.Minute)
	return w
}

// agree waits until all agents know exactly the live ones.
func (w *crowd) agree(within time.Duration) {
	w.t.Helper()
	for begin := time.Now(); !w.agreed(); time.Sleep(10 * time.Millisecond) {
		if time.Since(begin) > within {
			w.t.Fatalf("not everybody knows all after %v", within)
		}
	}
}

func (w *crowd) agreed() bool {
	there := 0
	for _, a := range w.here {
		if !a.gone {
			there++
		}
	}
	for _, a := range w.here {
		if !a.gone && !a.knowsOnly(w.here, there) {
			return false
		}
	}
	return true
}

// knowsOnly reports whether a knows exactly the live agents.
func (a *agent) knowsOnly(here []*agent, there int) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.peers) != there-1 {
		return false
	}
	for _, b := range here {
		if _, ok := a.peers[b.self]; ok && b.gone {
			return false
		}
	}
	return true
}

// crash silences every tenth host.
func (w *crowd) crash() {
	for i, a := range w.here {
		if i%10 == 5 {
			a.host.Crash()
			a.gone = true
		}
	}
}

// sent returns the average traffic of the live agents.
func (w *crowd) sent() (packets, bytes float64) {
	n := 0
	for _, a := range w.here {
		if !a.gone {
			s := a.host.Sent()
			packets, bytes, n = packets+float64(s.Packets), bytes+float64(s.PacketBytes+s.StreamBytes), n+1
		}
	}
	n = max(n, 1)
	return packets / float64(n), bytes / float64(n)
}

// end ends all agents without a last message.
func (w *crowd) end() {
	for _, a := range w.here {
		a.host.Kill()
		a.list.Shutdown()
		a.wait.Wait()
		a.stop()
	}
	time.Sleep(5 * time.Second) // pending waits time out
}

// A spent is the cost of a part of a simulation: time, and traffic per agent.
type spent struct {
	time           time.Duration
	packets, bytes float64
}

// measure runs a part.
func (w *crowd) measure(part func()) (s spent) {
	begin := time.Now()
	packets, bytes := w.sent()
	part()
	s.packets, s.bytes = w.sent()
	return spent{time.Since(begin), s.packets - packets, s.bytes - bytes}
}

func (s spent) String() string {
	return fmt.Sprintf("%.1f s | %.0f | %.0f", s.time.Seconds(), s.packets, s.bytes/1024)
}

// TestSimulation starts agents on a network that loses packets, waits, and crashes every tenth host. With -v it prints
// rows of docs/benchmarks/202611_cluster.md.
func TestSimulation(t *testing.T) {
	losses := []float64{0.05, 0}
	if testing.Short() {
		losses = losses[:1]
	}
	for _, loss := range losses {
		t.Run(fmt.Sprintf("loss=%v", loss), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { simulate(t, *simAgents, loss) })
		})
	}
}

func simulate(t *testing.T, agents int, loss float64) {
	w := &crowd{
		t: t,
		net: NewNetwork(
			1,
			Conditions{Loss: loss, Delay: 100 * time.Microsecond, Jitter: 400 * time.Microsecond},
		),
	}
	defer w.end()
	row := func(what string, s spent) { t.Logf("| %s | %d | %.0f %% | %v |", what, agents, 100*loss, s) }
	row("agents start within 1 s; until all know all", w.measure(func() {
		w.gather(agents)
		w.agree(2 * time.Minute)
	}))
	wrong := 0
	watch := func(seconds int) func() {
		return func() {
			for range seconds {
				time.Sleep(time.Second)
				if !w.agreed() {
					wrong++
				}
			}
		}
	}
	row("the minute after", w.measure(watch(60)))
	row("10 s at rest", w.measure(watch(10)))
	// Consecutive lost probes can make an agent drop a live one for a moment, rarely. Readers of a hint ask the agent
	// before they act.
	t.Logf("in %d of these 70 seconds some agent missed one that was there", wrong)
	if wrong > 7 {
		t.Errorf("in %d of 70 seconds somebody was missed who was there", wrong)
	}
	w.crash()
	row("1 in 10 hosts crashes; until all others know", w.measure(func() { w.agree(5 * time.Second) }))
}
