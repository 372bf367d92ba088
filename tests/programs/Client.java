// The client in Java, whose sockets are AF_INET6 with IPv4-mapped addresses wherever the machine has IPv6. Arguments
// and // output are those of the other clients.

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.UncheckedIOException;
import java.net.ConnectException;
import java.net.DatagramPacket;
import java.net.DatagramSocket;
import java.net.Inet6Address;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.PortUnreachableException;
import java.net.Socket;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse.BodyHandlers;
import java.util.ArrayList;
import java.util.List;

public class Client {
    static final int TIMEOUT_MS = 10_000;

    record Answer(String text, Object peer) {}

    public static void main(String[] arguments) throws Exception {
        for (String argument : arguments) {
            String[] parts = argument.split("=", 2);
            Answer answer;
            try {
                answer = carryOut(parts[0], parts[1]);
            } catch (ConnectException | PortUnreachableException refused) {
                answer = new Answer("refused", "-");
            } catch (UncheckedIOException wrapped) {
                if (!(wrapped.getCause() instanceof ConnectException)) {
                    throw wrapped;
                }
                answer = new Answer("refused", "-");
            }
            System.out.println(argument + "\t" + answer.text + "\t" + text(answer.peer));
        }
    }

    static Answer carryOut(String operation, String target) throws Exception {
        return switch (operation) {
            case "http" -> http(target);
            case "tcp" -> tcp(target);
            case "udp" -> udp(target, true);
            case "unconnected" -> udp(target, false);
            case "resolve" -> resolve(target);
            default -> throw new IllegalArgumentException(operation);
        };
    }

    static Answer http(String url) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        String body = client.send(HttpRequest.newBuilder(URI.create(url)).build(), BodyHandlers.ofString()).body();
        return new Answer(body.strip(), "-");
    }

    /** Tries the addresses of a name one after the other; only a refusal makes it go on. */
    static Answer tcp(String target) throws IOException {
        ConnectException last = null;
        for (InetAddress address : InetAddress.getAllByName(host(target))) {
            try (Socket socket = new Socket(address, port(target))) {
                socket.setSoTimeout(TIMEOUT_MS);
                String name = new BufferedReader(new InputStreamReader(socket.getInputStream())).readLine();
                return new Answer(name, socket.getRemoteSocketAddress());
            } catch (ConnectException refused) {
                last = refused;
            }
        }
        throw last;
    }

    static Answer udp(String target, boolean connected) throws IOException {
        InetSocketAddress to = new InetSocketAddress(host(target), port(target));
        try (DatagramSocket socket = new DatagramSocket()) {
            socket.setSoTimeout(TIMEOUT_MS);
            String question = connected ? "connected" : "unconnected";
            DatagramPacket packet = new DatagramPacket(question.getBytes(), question.length());
            if (connected) {
                socket.connect(to);
            } else {
                packet.setSocketAddress(to);
            }
            socket.send(packet);
            packet = new DatagramPacket(new byte[2048], 2048);
            socket.receive(packet);
            String answer = new String(packet.getData(), 0, packet.getLength());
            if (!answer.endsWith(" " + question)) {
                throw new IOException(answer + " is no answer to " + question);
            }
            return new Answer(answer.substring(0, answer.lastIndexOf(' ')), packet.getSocketAddress());
        }
    }

    static Answer resolve(String name) throws IOException {
        List<String> addresses = new ArrayList<>();
        for (InetAddress address : InetAddress.getAllByName(name)) {
            addresses.add(address.getHostAddress());
        }
        return new Answer(String.join(" ", addresses), "-");
    }

    static String host(String target) {
        return target.substring(0, target.lastIndexOf(':'));
    }

    static int port(String target) {
        return Integer.parseInt(target.substring(target.lastIndexOf(':') + 1));
    }

    static String text(Object peer) {
        return peer instanceof InetSocketAddress address ? text(address.getAddress()) + ":" + address.getPort() : "-";
    }

    /** Without a name, and in brackets where it is IPv6. */
    static String text(InetAddress address) {
        return address instanceof Inet6Address ? "[" + address.getHostAddress() + "]" : address.getHostAddress();
    }
}
