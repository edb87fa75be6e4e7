package metrics

import (
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
)

// scrape reads /metrics on a connection of its own, so that nothing stays open.
func scrape(t *testing.T, addr string) string {
	t.Helper()
	tr := &http.Transport{DisableKeepAlives: true}
	defer tr.CloseIdleConnections()
	res, err := (&http.Client{Transport: tr}).Get("http://" + addr + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil || res.StatusCode != http.StatusOK {
		t.Fatalf("scrape: %s, %v", res.Status, err)
	}
	return string(body)
}

func TestPrometheus(t *testing.T) {
	p, err := ServePrometheus(":0", 292)
	if err != nil {
		t.Fatal(err)
	}
	if host, _, _ := net.SplitHostPort(p.Addr()); host != "127.0.0.1" {
		t.Errorf("\":0\" listens on %s, want the loopback interface", p.Addr())
	}
	if got := scrape(t, p.Addr()); !strings.Contains(got, "cprun_loss NaN\n") {
		t.Errorf("before the first step:\n%s\nwant a loss of NaN", got)
	}
	val := Float(2.5)
	validated := step(301)
	validated.ValLoss = &val
	for _, s := range []Step{validated, step(302)} {
		if err := p.Write(s); err != nil {
			t.Fatal(err)
		}
	}
	got := scrape(t, p.Addr())
	for _, want := range []string{
		"cprun_step 302\n", "cprun_loss -32.25\n", "cprun_grad_norm 1.25\n", "cprun_learning_rate 0.0003\n",
		"cprun_steps_total 10\n", "cprun_tokens_total 1.236992e+06\n", "cprun_comm_wait_seconds_total 0.625\n",
		"cprun_mfu_ratio NaN\n", "cprun_validation_loss 2.5\n", "# TYPE cprun_tokens_total counter\n",
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
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	if c, err := net.Dial("tcp", p.Addr()); err == nil {
		c.Close()
		t.Error("the address is still served after Close")
	}
}
