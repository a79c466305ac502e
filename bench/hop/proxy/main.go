// Command proxy is a router without Envoy: httputil.ReverseProxy with a table of destinations.
package main

import (
	"flag"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"os"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/berth-sandbox/berth/bench/hop/table"
)

func main() {
	admin := flag.String("admin", "", "address of /metrics")
	file := flag.String("table", "", "file with a host and a destination in each line")
	flag.Parse()
	log.Fatal(run(*admin, *file))
}

// run serves on file descriptor 3, which the parent has bound.
func run(admin, file string) error {
	all, _, err := table.Read(file)
	if err != nil {
		return err
	}
	l, err := net.FileListener(os.NewFile(3, "listener"))
	if err != nil {
		return err
	}
	pages, err := net.Listen("tcp", admin)
	if err != nil {
		return err
	}
	go func() { log.Fatal(http.Serve(pages, promhttp.Handler())) }()
	transport := &http.Transport{MaxIdleConnsPerHost: 64, DisableCompression: true} // and no bound for all hosts
	proxy := &httputil.ReverseProxy{
		Transport: transport,
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Scheme, r.Out.URL.Host = "http", all[r.In.Host]
		},
	}
	return http.Serve(l, proxy)
}
