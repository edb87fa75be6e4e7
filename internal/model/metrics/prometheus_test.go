package metrics

import (
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
)

// scrape reads /metrics on a connection of its own, so that nothing stays open.
func scrape(t *testing.T, addr string) string {
	t.Helper()
	tr := &http.Transport{DisableKeepAlives: true}
	defer tr.CloseIdleConnections()
	res := must.Have((&http.Client{Transport: tr}).Get("http://" + addr + "/metrics"))
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil || res.StatusCode != http.StatusOK {
		t.Fatalf("scrape: %s, %v", res.Status, err)
	}
	return string(body)
}

func TestPrometheus(t *testing.T) {
	p := must.Have(ServePrometheus(":0", 292))
	if host, _, _ := net.SplitHostPort(p.Addr()); host != "127.0.0.1" {
		t.Errorf("\":0\" listens on %s, want the loopback interface", p.Addr())
	}
	if got := scrape(t, p.Addr()); !strings.Contains(got, "cprun_loss NaN\n") {
		t.Errorf("before the first step:\n%s\nwant a loss of NaN", got)
	}
	val := Float(2.5)
	validated := step(301)
	validated.ValLoss, validated.ValLosses = &val, map[string]Float{"prose": 2, "code/\xff\"go": 3.5}
	for _, s := range []Step{validated, step(302)} {
		must.Do(t, p.Write(s))
	}
	got := scrape(t, p.Addr())
	for _, want := range []string{
		"cprun_step 302\n", "cprun_loss -32.25\n", "cprun_grad_norm 1.25\n", "cprun_learning_rate 0.0003\n",
		"cprun_steps_total 10\n", "cprun_tokens_total 1.236992e+06\n", "cprun_comm_wait_seconds_total 0.625\n",
		"cprun_mfu_ratio NaN\n", "cprun_validation_loss 2.5\n",
		"cprun_source_validation_loss{source=\"prose\"} 2\n",
		"cprun_source_validation_loss{source=\"code/?\\\"go\"} 3.5\n", "# TYPE cprun_tokens_total counter\n",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("scrape has no %q:\n%s", want, got)
		}
	}
	if strings.Contains(got, "go_goroutines") {
		t.Error("the process's own metrics are served")
	}
	if _, err := ServePrometheus(p.Addr(), 0); err == nil || !strings.Contains(err.Error(), "another port") {
		t.Errorf("a second server on %s: %v, want an error that says to choose another port", p.Addr(), err)
	}
	must.Do(t, p.Close())
	if c, err := net.Dial("tcp", p.Addr()); err == nil {
		c.Close()
		t.Error("the address is still served after Close")
	}
}

// descriptors counts the open descriptors of this process.
func descriptors(t *testing.T) int {
	t.Helper()
	open := must.Have(os.ReadDir("/proc/self/fd"))
	return len(open)
}

// Idle connections, half requests and clients that read no answer cost a few descriptors, and do not delay the end of a
// run.
func TestPrometheusAmongStrangers(t *testing.T) {
	const strangers = 300
	p := must.Have(ServePrometheus(":0", 0))
	before := descriptors(t)
	var held []net.Conn
	for i := range strangers {
		c := must.Have(net.Dial("tcp", p.Addr()))
		held = append(held, c)
		switch i % 3 {
		case 1:
			io.WriteString(c, "GET /metrics HTTP/1.1\r\nHost: x\r\nX-Slow: ")
		case 2:
			io.WriteString(c, strings.Repeat("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 100))
		}
	}
	if taken := descriptors(t) - before - strangers; taken > maxScrapes+4 {
		t.Errorf("the server holds %d descriptors for %d connections, want at most %d", taken, strangers, maxScrapes)
	}
	must.Do(t, p.Write(step(1)))
	for _, c := range held[:strangers-20] {
		c.Close()
	}
	if got := scrape(t, p.Addr()); !strings.Contains(got, "cprun_step 1\n") { // now, or after the timeout of the others
		t.Errorf("scrape among strangers:\n%s", got)
	}
	if err := p.Close(); err != nil {
		t.Errorf("the end of the run: %v", err)
	}
	for _, c := range held {
		c.Close()
	}
}

// An oversized header and an unknown method or path get an answer, and the connection closes.
func TestPrometheusRefuses(t *testing.T) {
	p := must.Have(ServePrometheus(":0", 0))
	for request, want := range map[string]string{
		"GET /metrics HTTP/1.1\r\nHost: x\r\nX: " + strings.Repeat("x", 64<<10) + "\r\n\r\n": "431 ",
		"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999999\r\n\r\n":            "405 ",
		"GET /secret HTTP/1.1\r\nHost: x\r\n\r\n":                                            "404 ",
		"\x1b[31m\r\n\r\n": "400 ",
	} {
		c := must.Have(net.Dial("tcp", p.Addr()))
		io.WriteString(c, request)
		answer := make([]byte, 64)
		n, err := io.ReadAtLeast(c, answer, 16)
		if !strings.Contains(string(answer[:n]), want) {
			t.Errorf("%.40q is answered %q, %v; want %s", request, answer[:n], err, want)
		}
		c.Close()
	}
	must.Do(t, p.Close())
}
